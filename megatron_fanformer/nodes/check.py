"""The command `check-node`: this node alone, or all nodes that a launcher started it on, each compared with the others.

One process of each node takes part, and any other leaves at once. They meet at a store as the ranks of a run do. Node 0
judges: it collects what each node found of itself, has those that answered measure their links, and publishes the
verdicts. Nobody waits longer than its limit for another one, nor for a piece of its own hardware: what hangs is named.
"""

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from megatron_fanformer.durable_files import file_problems, write_atomically
from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.nodes.facts import STARTING, Facts, facts_from_plain, find_facts
from megatron_fanformer.nodes.judgement import Links, Rates, Verdict, judge
from megatron_fanformer.nodes.limits import LINKS_SECONDS
from megatron_fanformer.nodes.verb import CheckConfig
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.launch import print_end
from megatron_fanformer.terminal import show

JUDGE = 0
POLL_SECONDS = 0.1
WORKER = "check"  # the name of threads that may hang
ACKNOWLEDGED_SECONDS = 10.0  # for the others to read the verdicts


def check_nodes(config: CheckConfig) -> None:
    """Check this node, or those that meet here, and print the verdicts (node 0 does).

    Raises:
        FanformerError: a node is unhealthy, or the nodes do not answer.
    """
    raised: FanformerError | OSError | None = None
    try:
        _check_nodes(config)
    except (FanformerError, OSError) as error:
        raised = error
    if any(thread.name == WORKER for thread in threading.enumerate()):
        # A worker that hangs would keep the interpreter from exiting.
        sys.stdout.flush()
        if raised is not None:
            print_end(raised if isinstance(raised, FanformerError) else FanformerError(str(raised)))
        os._exit(getattr(raised, "exit_code", 0 if raised is None else 1))
    if raised is not None:
        raise raised


def _check_nodes(config: CheckConfig) -> None:
    address = devices.rank_address()
    if address is not None and address.local_rank > 0:
        return  # its node's first process looks at all of it
    local = address.local_world_size if address is not None else 1
    number = address.rank // local if address is not None else JUDGE
    count = address.world_size // local if address is not None else 1
    _check_paths(config, number, count)
    facts, links = Facts(), Links()
    if not _done_within(config.time_limit, lambda: find_facts(facts, config.folder)):
        facts.problems.append(
            f"it was still at {facts.doing} after {config.time_limit:g} s; leave it out, and have it looked at"
        )
    if facts.doing == STARTING:  # the others cannot be met without torch
        own = Verdict(node=facts.node, problems=facts.problems)
        if number == JUDGE:
            _report([own], config)
        raise _Unhealthy(own.line() if number != JUDGE else "")
    try:
        meeting = _Meeting(address, number, count, config.time_limit)
        verdicts = _verdicts(meeting, facts, links, config) if number == JUDGE else _judged(meeting, facts, links)
    except RuntimeError as error:  # torch's, of a store that is gone
        reason = str(error).splitlines()[0]
        raise FanformerError(
            f"{facts.node}: unhealthy: the first node does not answer ({reason}); see its network, and whether the "
            "first node is up"
        ) from error
    finally:
        if (left := facts.shared_file) is not None:  # where its file system hangs, the file stays
            _done_within(ACKNOWLEDGED_SECONDS, lambda: Path(left).unlink(missing_ok=True))
    if number == JUDGE:
        _report(verdicts, config)
    sick = sum(not verdict.is_healthy for verdict in verdicts)
    if sick:
        is_summed_up = number == JUDGE and count > 1
        raise _Unhealthy(f"{sick} of {count} nodes are unhealthy; leave them out" if is_summed_up else "")


def _check_paths(config: CheckConfig, number: int, count: int) -> None:
    """Look at the options' paths, before anything else takes time.

    Raises:
        InputError: one line for each that is of no use.
        FanformerError: their file system hangs.
    """
    found: list[str] = []
    looking_at = config.folder

    def look() -> None:
        nonlocal looking_at
        if count == 1 and config.folder is not None and not config.folder.is_dir():
            found.append(f"--folder {config.folder} is not a folder; name one that all nodes share")
        looking_at = config.output
        if number == JUDGE:
            found.extend(file_problems(output=config.output))

    if not _done_within(config.time_limit, look):
        raise _hanging(config, f"looking at {looking_at}")
    if found:
        raise InputError("\n".join(found))


def _hanging(config: CheckConfig, doing: str) -> FanformerError:
    return FanformerError(
        f"{devices.node_name()}: unhealthy: it was still {doing} after {config.time_limit:g} s; see whether that file "
        "system is up, or leave the node out"
    )


class _Unhealthy(FanformerError):
    """A node is unhealthy; without a message where the verdicts, or another node, report all of it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.already_reported = not message


def _done_within(seconds: float, work: Callable[[], None]) -> bool:
    """Return whether some work of this node's ended in time; it is left alone if not."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    worker = threading.Thread(target=run, name=WORKER, daemon=True)
    worker.start()
    worker.join(seconds)
    if raised:
        raise raised[0]
    return not worker.is_alive()


class _Meeting:
    """The store of the nodes; each publishes a value once, and collects the others' until a limit."""

    def __init__(self, address: devices.RankAddress | None, number: int, count: int, seconds: float) -> None:
        from torch.distributed import HashStore, PrefixStore, TCPStore

        from megatron_fanformer.runtime.meeting import hosted_store

        self.number, self.count, self.seconds = number, count, seconds
        self._own: Any = HashStore()
        if address is not None:
            place, port, limit = address.master_address, address.master_port, timedelta(seconds=seconds)
            if number == JUDGE and not devices.store_is_hosted():
                others = count > 1
                self._own = hosted_store(place, port, has_other_machines=others, timeout=limit, wait_for_workers=False)
            else:
                self._own = TCPStore(place, port, timeout=limit, wait_for_workers=False)
        # torchrun's is the same after a restart, with the answers of the check before.
        self._prefixed = partial(PrefixStore, f"check-{devices.restart_count()}")
        self.store: Any = self._prefixed(self._own)

    def other_client(self) -> Any:
        """Return another client of the store: what hangs may hold one."""
        return self._prefixed(self._own.clone())

    def publish(self, what: str, value: Any) -> None:
        """Publish a value for the others."""
        self.store.set(f"{what}-{self.number}", json.dumps(value))

    def collect(self, what: str, numbers: Collection[int], seconds: float) -> dict[int, Any]:
        """Return the nodes' values, by number, of those that came in time."""
        keys = {number: f"{what}-{number}" for number in numbers}
        end = time.monotonic() + seconds
        while keys and not self.store.check(list(keys.values())) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        return {number: json.loads(self.store.get(key)) for number, key in keys.items() if self.store.check([key])}


def _verdicts(meeting: _Meeting, own: Facts, links: Links, config: CheckConfig) -> list[Verdict]:
    """Do what node 0 does: return the verdicts on all nodes, in their order, and publish them for the others."""
    others = [number for number in range(meeting.count) if number != JUDGE]
    answers = meeting.collect("facts", others, meeting.seconds)
    found = {JUDGE: own, **{number: facts_from_plain(values) for number, values in answers.items()}}
    _read_shared_files(found, meeting.seconds)
    taking_part, gpus = nodes_to_measure(found)
    meeting.publish("links", (taking_part, gpus))
    if JUDGE in taking_part:
        _measure(own, links, meeting, taking_part, gpus)
    measured = meeting.collect("rates", [number for number in taking_part if number != JUDGE], LINKS_SECONDS)
    for number in taking_part:
        if number not in {JUDGE, *measured}:
            found[number].problems.append(
                f"it did not answer within {LINKS_SECONDS:g} s after its links were to be measured; leave it out, "
                "and see whether it is up"
            )
    rates = {
        number: {int(other): Rates(**values) for other, values in own_rates.items()}
        for number, own_rates in measured.items()
    }
    judged = judge(found, {JUDGE: links, **rates}, config)
    missing = f"it did not answer within {meeting.seconds:g} s; leave it out, and see whether it is up"
    verdicts = [
        judged.get(number) or Verdict(node=f"node {number} of {meeting.count}", problems=[missing])
        for number in range(meeting.count)
    ]
    meeting.publish("verdicts", [verdict.is_healthy for verdict in verdicts])
    # The store may end with this process, and those whose links were not measured read the verdicts, too.
    meeting.collect("acknowledged", answers, ACKNOWLEDGED_SECONDS)
    return verdicts


def nodes_to_measure(found: Mapping[int, Facts]) -> tuple[list[int], int]:
    """Return the nodes whose links are measured, those that have as many GPUs as most, and that number.

    A node with fewer is unhealthy by that: with it, the others' links would be measured without the GPUs that it lacks.
    """
    shown = {number: len(facts.gpus) for number, facts in found.items() if facts.doing == "done"}
    often = Counter(shown.values())
    gpus = max(often, key=lambda count: (often[count], count), default=0)
    return [number for number, count in shown.items() if count == gpus], gpus


def _read_shared_files(found: Mapping[int, Facts], seconds: float) -> None:
    """Remove the nodes' files in the shared folder; note whose could not be read here, or that it hangs here."""
    is_same: dict[int, bool] = {}
    files = {number: Path(facts.shared_file) for number, facts in found.items() if facts.shared_file is not None}

    def read() -> None:
        for number, file in files.items():
            try:
                is_same[number] = file.read_text() == found[number].shared_text
                file.unlink(missing_ok=True)
            except OSError:
                is_same[number] = False

    own = found[JUDGE]
    if files and not _done_within(seconds, read):
        folder = files[max(files)].parent
        own.problems.append(
            f"it was still reading what the nodes wrote into {folder} after {seconds:g} s; leave it out, and have it "
            "looked at"
        )
    for number, file in files.items():
        if not is_same.get(number, True):
            found[number].problems.append(
                f"what it wrote into {file.parent} is not what {own.node} reads there; mount the same file system"
            )


def _judged(meeting: _Meeting, facts: Facts, links: Links) -> list[Verdict]:
    """Do what any other node does: publish its facts, measure, and read whether all are healthy."""
    meeting.publish("facts", asdict(facts))
    # Node 0 has that for its paths, its own facts, the others' and their files.
    answers = meeting.collect("links", [JUDGE], 4 * meeting.seconds)
    if JUDGE in answers:
        taking_part, gpus = answers[JUDGE]
        if meeting.number in taking_part:
            _measure(facts, links, meeting, taking_part, gpus)
            meeting.publish("rates", {other: asdict(rates) for other, rates in links.items()})
        answers = meeting.collect("verdicts", [JUDGE], 2 * LINKS_SECONDS)
    if JUDGE not in answers:
        raise FanformerError(f"{facts.node}: the first node has not judged in time; see whether it is up")
    meeting.publish("acknowledged", True)
    return [
        Verdict(node=str(number), problems=[] if is_healthy else ["reported by the first node"])
        for number, is_healthy in enumerate(answers[JUDGE])
    ]


def _measure(facts: Facts, links: Links, meeting: _Meeting, nodes: list[int], gpus: int) -> None:
    if len(nodes) < 2:
        return
    from megatron_fanformer.nodes.links import measure_links

    store = meeting.other_client()
    _done_within(LINKS_SECONDS, lambda: measure_links(links, store, meeting.number, nodes, gpus))  # as far as it came


def _report(verdicts: list[Verdict], config: CheckConfig) -> None:
    if config.json:
        healthy = all(verdict.is_healthy for verdict in verdicts)
        print(json.dumps({"healthy": healthy, "nodes": [verdict.as_plain() for verdict in verdicts]}))
    else:
        show(verdict.line() for verdict in verdicts)
    if config.output is not None:
        output, names = config.output, [f"{verdict.node}\n" for verdict in verdicts if verdict.is_healthy]
        if not _done_within(config.time_limit, lambda: write_atomically(output, "".join(names))):
            raise _hanging(config, f"writing {output}")
