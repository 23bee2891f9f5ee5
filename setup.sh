#!/usr/bin/env bash
# Make .venv with pinned packages and the muster command in it; ./setup.sh --help lists the options.
#
# .venv/setup.state says what is complete: one line per fact, written after the fact. A call compares it with what is
# asked for and does the rest, so a second call does nothing and an interrupted one is carried on or begun anew.
# Exit codes are those of jobs/basics/exits.py.
if [ -z "${BASH_VERSION:-}" ]; then exec bash "$0" "$@"; fi # somebody said: sh setup.sh
set -euo pipefail

readonly USAGE=2 UNREACHABLE=69 FOLDER=73 STORAGE=74 REFUSED=78 STOPPED=130
readonly CPU_INDEX=https://download.pytorch.org/whl/cpu
readonly DRIVER_FILES=(/dev/nvidiactl /proc/driver/nvidia/version /dev/dxg) # where one is, there is an NVIDIA driver
readonly LAYOUT=2 # raise it when install_muster writes something new: every .venv then gets that group again

repository=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
readonly repository venv=$repository/.venv
readonly state_file=$venv/setup.state log=$venv/setup.log
declare -A state=()
want_dev=no want_torch=yes want_build=auto want_hashes=yes want_system_site=no want_python=''

main() {
  parse "$@"
  take_turn
  read_state
  if is_ours && ! is_outdated && [[ -z $(missing_groups) && $want_hashes == "${state[hashes]-yes}" ]]; then
    say "ready, nothing to do ($(summary))"
    return
  fi
  if ! is_ours || is_outdated; then make_venv; fi
  if [[ $want_hashes != "${state[hashes]-yes}" ]]; then remember hashes "$want_hashes"; fi
  local group
  for group in $(missing_groups); do
    forget "$group"
    "install_$group"
    remember "$group" "$(fingerprint "$group")"
  done
  say "ready in $SECONDS s ($(summary))"
  say "try: .venv/bin/muster $([[ ${state[torch]-} ]] && echo run || echo plan) jobs/examples/vgg11.yaml"
}

usage() {
  cat <<'TEXT'
usage: ./setup.sh [options]

Makes .venv next to this file: pinned packages from requirements/ and the muster command. Call it as often as you like.

  --dev                    also the tools of the tests: pytest, hypothesis, mypy, ruff
  --cpu                    PyTorch's CPU build, about 200 MB, where its index can be reached
  --cuda                   PyTorch's CUDA build, about 3 GB; default: this where an NVIDIA driver is, else the CPU build
  --launcher-only          everything but torch, for machines that start runs and train nothing (login nodes)
  --python PATH            the Python to use, 3.10 or newer (default: the first such python3 on PATH)
  --system-site-packages   let .venv see that Python's own packages; a torch >= 2.11 found there is used
  --no-hashes              check versions only, for package mirrors that rebuild wheels; .venv remembers it
  --help                   this text
TEXT
}

parse() {
  while (($#)); do
    case $1 in
      --dev) want_dev=yes ;;
      --cpu | --cuda) want_build=${1#--} ;;
      --launcher-only) want_torch=no ;;
      --system-site-packages) want_system_site=yes ;;
      --no-hashes) want_hashes=no ;;
      --python)
        (($# > 1)) || fail $USAGE "--python needs the path of an interpreter"
        want_python=$2
        shift
        ;;
      --python=*) want_python=${1#*=} ;;
      --help | -h) usage && exit 0 ;;
      *) fail $USAGE "unknown option $1; ./setup.sh --help lists the options" ;;
    esac
    shift
  done
}

say() { printf 'setup: %s\n' "$*"; }

fail() {
  local code=$1
  shift
  printf 'setup.sh: %s\n' "$*" >&2
  exit "$code"
}

# One setup.sh at a time in a folder. A file system without locks answers with another code than 1: go on.
take_turn() {
  local answer=0 lock=$repository/.setup.lock
  command -v flock >/dev/null || return 0
  # A file that only we may open: whoever opens a file can hold its lock. A folder that is read-only is reported later.
  (umask 077 && : >>"$lock") 2>/dev/null || return 0
  exec 9>>"$lock"
  flock -n 9 2>/dev/null || answer=$?
  if ((answer == 1)); then
    say "another setup.sh is at work in this folder; waiting for it"
    flock -w 3600 9 || fail $REFUSED "another setup.sh has held $repository for an hour; end it, then call again"
  fi
}

# --- what is there, what is asked for ---------------------------------------------------------------------------

read_state() {
  local key value
  state=()
  [[ -r $state_file ]] || return 0
  while IFS='=' read -r key value; do
    if [[ $key ]]; then state[$key]=$value; fi
  done <"$state_file"
  # What an earlier call added stays asked for, so that a plain call removes nothing.
  if [[ ${state[dev]-} ]]; then want_dev=yes; fi
  if [[ $want_build == auto && ${state[flavour]-} == @(cpu|cuda) ]]; then want_build=${state[flavour]}; fi
  if [[ ${state[system_site]-} == yes ]]; then want_system_site=yes; fi
  if [[ ${state[hashes]-} == no ]]; then want_hashes=no; fi
}

remember() {
  state[$1]=$2
  write_state
}

forget() {
  unset "state[$1]"
  write_state
}

write_state() {
  local key
  {
    for key in "${!state[@]}"; do printf '%s=%s\n' "$key" "${state[$key]}"; done >"$state_file.new"
    mv -f "$state_file.new" "$state_file"
  } 2>/dev/null || explain "cannot write $state_file"
}

# True when .venv is complete and belongs to this folder: a copied or moved one points at the old place.
is_ours() {
  [[ ${state[python]-} && ${state[repository]-} == "$repository" ]] &&
    [[ $(version_of "$venv/bin/python") == "${state[python]}" ]]
}

# True when a flag asks for what only a new .venv can give.
is_outdated() {
  [[ $want_system_site != "${state[system_site]}" ]] ||
    [[ $want_build != auto && $want_torch == yes && ${state[flavour]-$want_build} == @(cpu|cuda) &&
      $want_build != "${state[flavour]-$want_build}" ]] ||
    [[ $want_python && $(base_of "$want_python") != "${state[interpreter]}" ]]
}

missing_groups() {
  local group
  for group in core $([[ $want_torch == no ]] || echo torch) $([[ $want_dev == no ]] || echo dev); do
    [[ ${state[$group]-} == "$(fingerprint "$group")" ]] || echo "$group"
  done
}

fingerprint() {
  local files=("$repository/requirements/$1.txt") also=''
  case $1 in
    core) also="$LAYOUT $(own_version)" ;;
    torch) files+=("$repository/requirements/cuda.txt") ;;
  esac
  cat "${files[@]}" - <<<"$also" | sha256sum | cut -c1-16
}

own_version() { sed -n 's/^version = "\(.*\)"/\1/p' "$repository/pyproject.toml"; }

summary() {
  printf '.venv/bin/muster, Python %s' "${state[python]}"
  if [[ ${state[torch]-} ]]; then printf ', torch %s' "${state[torch_version]-}"; else printf ', no torch'; fi
  if [[ ${state[dev]-} ]]; then printf ', test tools'; fi
}

# --- Python -----------------------------------------------------------------------------------------------------

version_of() { # prints 3.11.7; nothing for what is no Python 3
  local answer
  answer=$("$1" --version 2>/dev/null) || return 0
  if [[ $answer =~ ^Python\ ([0-9]+\.[0-9]+\.[0-9]+) ]]; then echo "${BASH_REMATCH[1]}"; fi
}

base_of() { # prints the interpreter that a virtual environment or a wrapper stands for
  "$1" -I -c 'import os, sys; print(os.path.realpath(sys._base_executable))' 2>/dev/null || true
}

is_new_enough() {
  local major minor
  IFS=. read -r major minor _ <<<"$1"
  ((major == 3 && minor >= 10))
}

# Sets asked to the first interpreter that is new enough and python to what it stands for, or says what was found.
find_python() {
  local candidate version old=''
  local candidates=(python3 python3.14 python3.13 python3.12 python3.11 python3.10)
  if [[ -x ${state[interpreter]-} ]]; then candidates=("${state[interpreter]}" "${candidates[@]}"); fi
  if [[ $want_python ]]; then candidates=("$want_python"); fi
  for candidate in "${candidates[@]}"; do
    version=$(version_of "$candidate")
    if [[ $version ]] && is_new_enough "$version"; then
      python=$(base_of "$candidate")
      asked=$(command -v "$candidate")
      python_version=$version
      if [[ $python ]]; then return; fi
    fi
    if [[ $version && ! $old ]]; then old="$candidate is Python $version"; fi
  done
  if [[ ! $old && $want_python ]]; then fail $USAGE "--python $want_python: no Python there"; fi
  if [[ $old ]]; then
    fail $REFUSED "$old, Muster needs 3.10 or newer; install one, or name it: ./setup.sh --python PATH"
  fi
  fail $REFUSED "no python3 found, Muster needs 3.10 or newer; run: sudo apt-get install -y python3 python3-venv"
}

make_venv() {
  local python python_version asked
  find_python
  if [[ -e $venv && ! -e $state_file && $(ls -A "$venv") ]]; then
    fail $REFUSED "$venv was not made by setup.sh; move it away, then call again"
  fi
  say "making .venv with Python $python_version ($python)"
  # The emptied state is what a later call finds if this one is cut short: it then begins anew.
  if ! { mkdir -p "$venv" && : >"$state_file"; } 2>/dev/null; then explain "cannot write $venv"; fi
  find "$venv/" -mindepth 1 ! -path "$state_file" -delete 2>/dev/null || explain "cannot empty $venv"
  : >"$log"
  "$python" -I -c 'import venv; from ensurepip import bootstrap' 2>>"$log" || install_venv_module
  local flags=()
  if [[ $want_system_site == yes ]]; then flags+=(--system-site-packages); fi
  "$python" -I -m venv "${flags[@]}" "$venv" >>"$log" 2>&1 || explain "cannot make $venv"
  state=([python]=$python_version [interpreter]=$python [asked]=$asked [repository]=$repository [system_site]=$want_system_site)
  write_state
}

# Debian and Ubuntu ship Python without its venv module; elsewhere it is there.
install_venv_module() {
  local package="python${python_version%.*}-venv" command
  if command -v apt-get >/dev/null; then
    command="apt-get install -y $package"
  elif command -v dnf >/dev/null; then
    package="python${python_version%.*}-libs" command="dnf install -y $package"
  else
    fail $REFUSED "$python has no venv module and there is no apt-get or dnf to get it; use another --python PATH"
  fi
  local as_root=()
  if ((EUID != 0)); then
    sudo -n true 2>/dev/null || fail $REFUSED "$python has no venv module; run: sudo $command"
    as_root=(sudo -n)
  fi
  say "installing the system package $package"
  if [[ $command == apt-get* ]]; then "${as_root[@]}" apt-get update >>"$log" 2>&1 || true; fi
  # shellcheck disable=SC2086 # command is words of ours
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive $command >>"$log" 2>&1 </dev/null ||
    explain "could not install $package; run: sudo $command"
  "$python" -I -c 'import venv; from ensurepip import bootstrap' 2>>"$log" ||
    fail $REFUSED "$python has no venv module, and $package did not bring it; use another --python PATH"
}

# --- the groups ---------------------------------------------------------------------------------------------------

install_core() {
  say "installing the launcher"
  install_pins core
  install_muster
}

install_torch() {
  if [[ $want_system_site == yes ]] && use_module_torch; then return; fi
  local wanted
  wanted=$(grep -o '^torch==[0-9.]*' "$repository/requirements/torch.txt")
  if [[ $want_build == auto ]] && ! has_driver; then
    want_build=cpu
    say "no NVIDIA driver here: taking torch's CPU build; for machines with GPUs call ./setup.sh --cuda"
  fi
  if [[ $want_build == cpu ]] && can_reach_cpu_index; then
    say "installing $wanted, the CPU build (about 200 MB; see .venv/setup.log)"
    install_cpu_torch --index-url "$CPU_INDEX"
  elif [[ $want_hashes == yes ]] && is_offered "torch" "${wanted#*==}+cpu"; then
    install_cpu_torch
  elif [[ $want_build == cpu ]]; then
    say "$CPU_INDEX cannot be reached; taking $wanted from the default index"
  fi
  say "installing $wanted and what it needs (see .venv/setup.log)"
  install_pins torch # pip looks up no torch that is installed
  note_torch
  if [[ $want_hashes == yes && ${state[flavour]} == cuda ]]; then install_pins cuda; fi
}

has_driver() {
  local file
  for file in "${DRIVER_FILES[@]}"; do if [[ -e $file ]]; then return 0; fi; done
  return 1
}

# Install torch's CPU build: its exact local version, with one of the hashes in torch.txt, and nothing that it needs. From
# PyTorch's index only this one file is taken; all other packages come from the default index.
install_cpu_torch() {
  local folder pin=$venv/torch-cpu.txt
  folder=$(requirements) || explain "cannot write $venv"
  awk '/^torch==/ { sub(/==[0-9.]+/, "&+cpu"); on = 1 } on { print; if (!/\\$/) exit }' "$folder/torch.txt" >"$pin" ||
    explain "cannot write $venv"
  pip_install --no-deps --only-binary :all: "$@" -r "$pin"
}

# True when pip's own configuration offers a version, as a folder of wheels (find-links) may offer the CPU build. By
# version pip would choose that one over the plain version; by hash it prefers files whose index lists the hash.
is_offered() {
  "$venv/bin/python" -I -m pip index versions --no-input --disable-pip-version-check "$1" 2>>"$log" </dev/null |
    grep -E '^Available versions: ' | tr -d ',' | tr ' ' '\n' | grep -xF "$2" >/dev/null
}

# Remember which torch is installed, and whether it is a build for CUDA.
note_torch() {
  local version_file
  version_file=$(site_packages)/torch/version.py
  state[torch_version]=$(sed -n "s/^__version__ = '\(.*\)'/\1/p" "$version_file")
  if grep -q '^cuda[^=]*= None' "$version_file"; then state[flavour]=cpu; else state[flavour]=cuda; fi
}

install_dev() {
  say "installing the test tools"
  install_pins dev
}

# True when the torch of the Python asked for is new enough. Where that Python is itself a virtual environment, or
# finds torch through PYTHONPATH as environment modules like it, ours sees neither: those folders go into a .pth file.
use_module_torch() {
  local show='import torch; print(torch.__version__)' found
  local folders='import os, sys; print(*filter(os.path.isdir, sys.path), sep="\n")'
  found=$("$venv/bin/python" -I -c "$show" 2>>"$log") || found=''
  if [[ ! $found ]]; then
    grep -vxFf <("$venv/bin/python" -I -c "$folders") <("${state[asked]}" -c "$folders") \
      >"$(site_packages)/modules.pth" || true
    found=$("$venv/bin/python" -I -c "$show" 2>>"$log") || found=''
  fi
  if [[ $found =~ ^([0-9]+)\.([0-9]+) ]] &&
    ((BASH_REMATCH[1] > 2 || (BASH_REMATCH[1] == 2 && BASH_REMATCH[2] >= 11))); then
    say "using torch $found of ${state[asked]}"
    state[torch_version]=$found state[flavour]=module
    return 0
  fi
  rm -f "$(site_packages)/modules.pth"
  say "torch of ${state[asked]}: ${found:-none}, 2.11 or newer is needed; installing our own"
  return 1
}

can_reach_cpu_index() {
  timeout 6 "$venv/bin/python" -I -c \
    'import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=5)' "$CPU_INDEX" 2>>"$log"
}

site_packages() { "$venv/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# A link and a four-line script instead of an editable install: that one's import hook costs every start 5 ms, and it
# needs setuptools on machines that need no torch. The link shows the one name muster, where a .pth file with the folder
# of the checkout would show all that lies there. -I: a user's own muster/ folder must not stand before ours.
install_muster() {
  local site info
  site=$(site_packages) info=$site/muster.dist-info
  {
    rm -f "$site/muster.pth" # of an older layout
    ln -sfn "$repository/muster" "$site/muster"
    mkdir -p "$info" # so that pip and importlib.metadata know muster and its version
    printf 'Metadata-Version: 2.1\nName: muster\nVersion: %s\n' "$(own_version)" >"$info/METADATA"
    printf 'setup.sh\n' >"$info/INSTALLER"
    # sh finds the interpreter, for a first line with #! takes neither spaces nor long paths; Python sees a string.
    cat >"$venv/bin/muster" <<TEXT
#!/bin/sh
'''exec' "$venv/bin/python" -I "\$0" "\$@" #'''
from muster.launch.cli import main

raise SystemExit(main())
TEXT
    chmod +x "$venv/bin/muster"
  } 2>>"$log" || explain "cannot write the muster command"
  "$venv/bin/python" -I -m compileall -q "$repository/muster" >>"$log" 2>&1 || true
}

# Install a file of requirements/. With hashes pip takes the listed wheels and nothing else. It resolves nothing, so that
# another index in the user's own pip configuration cannot add a package. It builds nothing, because pip would fetch the
# build tools without hashes. Without hashes pip resolves: rebuilt packages may need other ones.
install_pins() {
  local folder
  folder=$(requirements) || explain "cannot write $venv"
  if [[ $want_hashes == yes ]]; then
    pip_install --require-hashes --no-deps --only-binary :all: -r "$folder/$1.txt"
  else
    pip_install -r "$folder/$1.txt" -c "$folder/cuda.txt"
  fi
}

requirements() { # prints the folder to read pins from; after --no-hashes it holds copies without hashes
  local from=$repository/requirements to=$venv/requirements file
  if [[ $want_hashes == yes ]]; then echo "$from" && return; fi
  mkdir -p "$to" || return
  for file in "$from"/*.txt; do sed '/^ *--hash=/d; s/ \\$//' "$file" >"$to/${file##*/}" || return; done
  echo "$to"
}

pip_install() {
  printf '+ pip install %s\n' "$*" >>"$log"
  # PIP_USER: a user's own setting would aim beside .venv.
  PIP_USER=0 "$venv/bin/python" -I -m pip install --no-input --disable-pip-version-check --retries 2 "$@" \
    >>"$log" 2>&1 </dev/null || explain "pip could not install the packages"
}

# Ends with the reason why something failed, as far as the log and the disk show it.
explain() {
  local what=$1 last place=$repository
  if [[ -d $venv ]]; then place=$venv; fi
  local probe=$place/.probe.$$
  if ! : 2>/dev/null >"$probe"; then
    if df --output=avail "$place" 2>/dev/null | grep -qx ' *0'; then fail $STORAGE "$what: the disk is full; free some space"; fi
    fail $FOLDER "$what: $place is read-only for user $(id -un); clone into a folder of your own"
  fi
  if ! head -c 262144 /dev/zero 2>/dev/null >"$probe"; then
    rm -f "$probe"
    fail $STORAGE "$what: the disk of $place is full; free some space, then call again"
  fi
  rm -f "$probe"
  # Only what the step at hand wrote: from its own "+" line on.
  last=$(tac "$log" 2>/dev/null | sed '/^+ /q' || true)
  if grep -qE 'No space left on device|Disk quota exceeded|File too large' <<<"$last"; then
    fail $STORAGE "$what: a disk is full (see .venv/setup.log); free some space or set TMPDIR, then call again"
  fi
  if grep -q 'DO NOT MATCH THE HASHES' <<<"$last"; then
    local package digest
    package=$(sed -n 's/^ \{4\}\([^ ]*==[^ ]*\) from .*/\1/p' <<<"$last" | tail -n 1)
    digest=$(sed -n 's/^ *Got *\([0-9a-f]\{64\}\)$/\1/p' <<<"$last" | tail -n 1)
    fail 1 "$what: the file of ${package:-a package} has the SHA-256 ${digest:-(see .venv/setup.log)}, expected one that requirements/ lists; somebody may have changed it. If your package mirror rebuilds wheels, call again with --no-hashes"
  fi
  if grep -qiE 'name resolution|Name or service not known|(establish a|NewConnection|Max retries|refused|unreachable|timed out|timeout|ProxyError|SSLError|Temporary failure|Could not resolve)' <<<"$last"; then
    fail $UNREACHABLE "$what: no network, or the package index does not answer (see .venv/setup.log); connect or set https_proxy, then call again"
  fi
  last=$(grep -iE '^(error|e): ' <<<"$last" | head -n 1 || true)
  if [[ $want_hashes == yes && $last =~ (Could not find a version|No matching distribution) ]]; then
    last+="; --no-hashes lets pip build packages that have no wheel for this machine"
  fi
  fail 1 "$what: ${last:-see .venv/setup.log}"
}

trap 'printf "\nsetup.sh: stopped; call again to carry on\n" >&2; exit $STOPPED' INT TERM
main "$@"
