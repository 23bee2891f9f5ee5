"""The queue of mode asynchronous: every part is trained once, in any order of workers, also if some are lost."""

from threading import Thread

from muster.jobs.train.work_queue import NONE, PartResult, WorkQueue


def result(part: int) -> PartResult:
    return PartResult(float(part), 1.0)


def test_parts_are_handed_out_in_order_and_steps_complete_in_order():
    queue = WorkQueue(steps=2, parts=2)
    assert [queue.exchange(worker, NONE, None) for worker in (0, 1)] == [0, 1]
    assert queue.exchange(1, 1, result(1)) == 2  # worker 0 is slow
    assert queue.exchange(1, 2, result(2)) == 3
    assert queue.completed() == []  # as many parts as a step has are done, but not all of step 0
    finishing = Thread(target=queue.exchange, args=(1, 3, result(3)))  # waits for worker 0, which may be lost
    finishing.start()
    assert queue.exchange(0, 0, result(0)) == NONE
    finishing.join(60)
    assert not finishing.is_alive()
    first, second = queue.completed()
    assert (first.step, first.loss_sum, second.step, second.loss_sum) == (0, 1.0, 1, 5.0)
    assert first.ended <= second.ended
    assert queue.completed() == []


def test_the_part_of_a_lost_worker_goes_to_one_that_waits_at_the_end():
    queue = WorkQueue(steps=1, parts=2)
    assert [queue.exchange(worker, NONE, None) for worker in (0, 1)] == [0, 1]
    said: list[int] = []
    waiting = Thread(target=lambda: said.append(queue.exchange(0, 0, result(0))))
    waiting.start()
    queue.lose(1)
    waiting.join(60)
    assert said == [1]
    assert queue.exchange(0, 1, result(1)) == NONE
    [step] = queue.completed()
    assert (step.loss_sum, list(step.staleness)) == (1.0, [1.0, 1.0])


def test_a_lost_workers_late_result_does_not_count_twice():
    queue = WorkQueue(steps=1, parts=2)
    assert queue.exchange(1, NONE, None) == 0
    queue.lose(1)
    assert queue.exchange(0, NONE, None) == 0
    assert queue.exchange(1, 0, result(0)) == 1
    assert queue.completed() == []
