"""Names the ranks that a collective waited for in vain, and says where every other rank is.

A collective raises on the ranks that wait in it once `runtime.distributed_timeout_minutes` are over, or at once where a
peer's process is gone. The first of these ranks calls the roll in the store of the ranks: a thread of every rank
answers where its main thread is, and logs the stacks. A process that is stopped or gone does not answer. (Over NCCL
torch's watchdog ends the process instead, and its flight recorder has what it waited in: docs/debugging.md.)
"""

import json
import logging
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_fanformer.runtime.launch import PEER_FAILURE_WAIT_SECONDS, PeerFailed
from megatron_fanformer.terminal import some

LOST = re.compile("Connection (closed|reset) by peer|Broken pipe|unhandled system error|[Tt]imed out|wait timeout")
"""Messages of gloo, NCCL and the store if another rank does not take part."""
CALLED, ANSWERS = "roll called", "roll"  # keys in the store
POLL_SECONDS, POLLS_PER_SECOND = 1.0, 2000  # shortest time between a rank's polls; most polls of the store by all ranks
ANSWER_SECONDS = 10.0
WAITING, ELSEWHERE = "waiting at", "elsewhere, at"
REMEDY = "run the same command to continue from the last checkpoint"
PACKAGE = Path(__file__).resolve().parents[1]

logger = logging.getLogger(__name__)


@contextmanager
def naming_missing_ranks(store: Any, rank: int, world_size: int) -> Iterator[None]:
    """Raise PeerFailed, which names the missing ranks, if the block fails because other ranks do not take part.

    Args:
        store: a client of the ranks' store for this function alone, since its thread uses the client.
    """
    over = threading.Event()
    threading.Thread(target=_answer_when_called, args=(store, rank, world_size, over), daemon=True).start()
    try:
        yield
    except BaseException as error:
        over.set()
        text, code = str(error), getattr(error, "exit_code", 1)
        if not isinstance(error, RuntimeError) or not LOST.search(text):  # this rank fails by itself
            _try_in_time(lambda: _answer(store, rank, text, code))  # tells ranks that wait for this one why it failed
            raise
        answer = f"{WAITING} {_place(traceback.extract_tb(error.__traceback__))}"
        failure = _try_in_time(lambda: _call_roll(store, rank, world_size, answer))
        if failure is None:
            time.sleep(PEER_FAILURE_WAIT_SECONDS)  # lets the rank that hosts the store report first why it ended
            failure = PeerFailed(f"the store at which the ranks meet does not answer; rank {rank}: {answer}; {REMEDY}")
        raise failure from error
    over.set()


def describe(answers: dict[int, str], world_size: int) -> str:
    """Return the line that ends a run: which ranks are missing, and where every other one is.

    Args:
        answers: by rank, where the ranks are that have answered.
    """
    ranks_by_answer: dict[str, list[int]] = {}
    for rank in range(world_size):
        ranks_by_answer.setdefault(answers.get(rank, "stopped or gone"), []).append(rank)
    parts = [f"rank{'s' * (len(ranks) > 1)} {some(map(str, ranks))}: {text}" for text, ranks in ranks_by_answer.items()]
    parts.sort(key=lambda part: WAITING in part)  # first the ranks that the others wait for
    return f"a collective waits in vain; {'; '.join(parts)}; {REMEDY}"


def _answer_when_called(store: Any, rank: int, world_size: int, over: threading.Event) -> None:
    """Until `over` is set, wait for the roll call; then answer where the main thread is, and log all stacks."""
    with suppress(RuntimeError):  # torch's, for a store that is gone
        while not over.wait(max(POLL_SECONDS, world_size / POLLS_PER_SECOND)):
            if store.check([CALLED]):
                frames = sys._current_frames()
                place = _place(traceback.extract_stack(frames[threading.main_thread().ident or 0]))
                _answer(store, rank, f"{ELSEWHERE} {place}")
                for frame in frames.values():
                    stack = "".join(traceback.format_stack(frame))
                    logger.debug("the roll of the ranks was called; a thread is at\n%s", stack)
                return


def _answer(store: Any, rank: int, text: str, exit_code: int = 0) -> None:
    store.append(ANSWERS, json.dumps([rank, text, exit_code]) + "\n")  # a later answer of the rank replaces it


def _call_roll(store: Any, rank: int, world_size: int, answer: str) -> PeerFailed:
    """Give this rank's answer, that it waits, and call the roll; return the error to raise.

    The error of the first caller has the answers of all ranks, or of one that failed. The errors of later callers are
    marked as reported elsewhere.
    """
    _answer(store, rank, answer)
    if store.add(CALLED, 1) > 1:
        failure = PeerFailed("another rank reports which ranks are missing")
        failure.already_reported = True
        return failure
    deadline = time.monotonic() + ANSWER_SECONDS + world_size / POLLS_PER_SECOND
    answers: dict[int, tuple[str, int]] = {}  # a rank that is elsewhere may yet come to wait, or fail, and answer again
    while len(answers) < world_size or any(text.startswith(ELSEWHERE) for text, _ in answers.values()):
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS / 4)
        answers = {number: (text, code) for number, text, code in map(json.loads, store.get(ANSWERS).splitlines())}
    for number, (text, code) in answers.items():
        if code:
            failure = PeerFailed(f"rank {number}: {text}")
            failure.exit_code, failure.already_reported = code, True  # that rank reports it
            return failure
    return PeerFailed(describe({number: text for number, (text, _) in answers.items()}, world_size))


def _try_in_time(work: Callable[[], Any]) -> Any:
    """Return the value of `work`, which uses the store; None if the store fails or does not answer in time."""
    answers: list[Any] = []

    def work_and_keep() -> None:
        with suppress(RuntimeError):
            answers.append(work())

    thread = threading.Thread(target=work_and_keep, daemon=True)
    thread.start()
    thread.join(1.5 * ANSWER_SECONDS)
    return answers[0] if answers else None


def _place(stack: traceback.StackSummary) -> str:
    """Describe a stack by its innermost call, and by the innermost call in this package if that is another."""
    ours = next((frame for frame in reversed(stack) if Path(frame.filename).is_relative_to(PACKAGE)), stack[-1])
    texts = [
        f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} in {frame.name}" for frame in (stack[-1], ours)
    ]
    return ", called from ".join(dict.fromkeys(texts))
