"use strict";
// A flame graph: frames are nested <svg> elements whose x and width are percent, so that a zoom sets two attributes.
for (const graph of document.querySelectorAll(".flame")) {
  const figure = graph.closest("figure"), whole = figure.querySelector(".whole"), about = figure.querySelector(".about");
  const frames = [...graph.querySelectorAll(".frame")].map((element) => ({
    element, x: parseFloat(element.getAttribute("x")), width: parseFloat(element.getAttribute("width")),
    row: Number(element.dataset.row),
  }));
  const named = new Map(frames.map((frame) => [frame.element, frame]));
  const inside = (one, other) => one.x >= other.x - 0.001 && one.x + one.width <= other.x + other.width + 0.001;

  function zoom(to) {
    for (const frame of frames) {
      const above = frame.row < to.row && inside(to, frame), below = frame.row >= to.row && inside(frame, to);
      frame.element.setAttribute("x", above ? "0%" : `${100 * (frame.x - to.x) / to.width}%`);
      frame.element.setAttribute("width", above ? "100%" : `${100 * frame.width / to.width}%`);
      frame.element.setAttribute("display", above || below ? "inline" : "none");
      let text = frame.element.querySelector("text");
      if (!text && (above || below && frame.width / to.width > 0.02)) {
        text = document.createElementNS(graph.namespaceURI, "text");
        text.setAttribute("x", 3);
        text.setAttribute("y", 13);
        text.textContent = frame.element.getAttribute("aria-label").split(": ").slice(0, -1).join(": ");
        frame.element.append(text);
      }
    }
    whole.disabled = to === frames[0];
  }

  function focus(frame) {
    if (!frame) return;
    for (const each of frames) each.element.setAttribute("tabindex", each === frame ? 0 : -1);
    frame.element.focus();
  }

  const shown = (frame) => frame.element.getAttribute("display") !== "none";
  const beside = (from, step) => {
    const row = frames.filter((frame) => frame.row === from.row && shown(frame));
    return row[row.indexOf(from) + step];
  };
  const moves = {
    ArrowDown: (from) => frames.find((frame) => frame.row === from.row + 1 && shown(frame) && inside(frame, from)),
    ArrowUp: (from) => frames.find((frame) => frame.row === from.row - 1 && inside(from, frame)),
    ArrowLeft: (from) => beside(from, -1),
    ArrowRight: (from) => beside(from, 1),
  };
  graph.addEventListener("click", (event) => {
    const frame = named.get(event.target.closest(".frame"));
    if (frame) { zoom(frame); focus(frame); }
  });
  graph.addEventListener("keydown", (event) => {
    const frame = named.get(event.target.closest(".frame"));
    if (!frame || !(event.key in moves || ["Enter", " ", "Escape"].includes(event.key))) return;
    event.preventDefault();
    if (event.key in moves) focus(moves[event.key](frame));
    else if (event.key === "Escape") { zoom(frames[0]); focus(frames[0]); }
    else zoom(frame);
  });
  const tell = (event) => { about.textContent = event.target.closest?.(".frame")?.getAttribute("aria-label") ?? ""; };
  graph.addEventListener("focusin", tell);
  graph.addEventListener("pointerover", tell);
  whole.addEventListener("click", () => { zoom(frames[0]); focus(frames[0]); });
}
addEventListener("beforeprint", () => { for (const each of document.querySelectorAll("details.job")) each.open = true; });
