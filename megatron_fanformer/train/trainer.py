"""The loop of a run: steps, metrics, evaluation, checkpoints, and an orderly end."""

import logging
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.data_files import UnreadableError
from megatron_fanformer.data.chat_template import CHAT_TEMPLATE_JINJA, attached_files
from megatron_fanformer.data.tokenizer import tokenizer_file
from megatron_fanformer.errors import CorruptError, DivergenceError, InputError, Interrupted
from megatron_fanformer.model.build import build_stages
from megatron_fanformer.processes import manual_gc, signals_to
from megatron_fanformer.runtime.agreement import on_main
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.runtime.seeding import seed_everything
from megatron_fanformer.train.callbacks import (
    Callback,
    GarbageCollection,
    SourceCounter,
    SourceTotals,
    StepMetrics,
    Stragglers,
    is_due,
)
from megatron_fanformer.train.config import RunConfig
from megatron_fanformer.train.evaluation import Evaluation
from megatron_fanformer.train.interrupts import InterruptListener, Interrupts
from megatron_fanformer.train.loggers import Loggers, Start
from megatron_fanformer.train.machine_choices import attention_notice, choose_for_machine
from megatron_fanformer.train.optimizer import build_optimizer
from megatron_fanformer.train.phase_health import PhaseHealth
from megatron_fanformer.train.preflight import Damaged, RunStart, find_start, with_train_iters
from megatron_fanformer.train.profiling import Profiler
from megatron_fanformer.train.recovery import BadSteps, EventLog
from megatron_fanformer.train.samples import read_batches, run_datasets
from megatron_fanformer.train.saves import Checkpointer
from megatron_fanformer.train.schedule import build_scheduler
from megatron_fanformer.train.step import (
    StepBatches,
    StepResult,
    attempt_step,
    drop_gradient_hooks,
    gathered_weights,
    update_weights,
    wrap_stages,
)

StopReason = Literal["signal", "exit_interval", "exit_duration_in_mins"]

logger = logging.getLogger(__name__)


class Trainer:
    """A run on this rank. Every rank creates one, calls `train`, and calls `close` afterwards.

    Args:
        start: the run's starting point; None: rank 0 finds it now.
        console: the terminal that rank 0 writes to; None: a new console.
    """

    def __init__(
        self, config: RunConfig, grid: RankGrid, start: RunStart | None = None, console: Console | None = None
    ) -> None:
        start = start or on_main(lambda: find_start(config, grid.world_size))
        assert start is not None
        self._start = start
        config, notices = choose_for_machine(with_train_iters(config, start.train_iters), grid)
        self.config, self.grid, self.run = config, grid, Path(config.training.run_dir)
        self.step = self.consumed_samples = 0
        self._log_startup(notices)
        minutes = config.training.exit_duration_in_mins
        self._listener = InterruptListener(self.run, minutes) if grid.is_main else InterruptListener()
        self._interrupts = Interrupts()  # of all ranks together, as of the current step
        seed_everything(config.training.seed, graphable=config.kernels.cuda_graph_impl != "none")
        self._build()
        # A lambda, because `_start_or_resume` creates `_bad_steps` only later.
        self._saves = Checkpointer(config, grid, self._listener, note_saved=lambda: self._bad_steps.note_saved())
        self._num_micro_batches = config.num_micro_batches(grid.data_parallel_size)
        self._evaluation = Evaluation(config, start.evaluation, grid, lambda: self._listener.shared(grid).stop)
        self.profiler = Profiler(config.logging, grid, self.run)
        self._step_metrics = StepMetrics(config, grid, self._optimizer)
        # The replay of a CUDA graph calls no Python hooks, so a run with such graphs cannot measure phases.
        phase_interval = config.logging.phase_interval if config.kernels.cuda_graph_impl == "none" else None
        self._callbacks: list[Callback] = [
            PhaseHealth(self._stages, config.model, grid, interval=phase_interval),
            self._step_metrics,
            Stragglers(self._wrapped, grid, interval=config.logging.norm_interval),
            GarbageCollection(),
        ]
        self._attachments: dict[str, bytes] = {}  # files to store in every checkpoint
        if grid.is_main:  # the rank that publishes checkpoints
            tokenizer = tokenizer_file(config.data.tokenizer) if config.data.tokenizer else None
            self._attachments = attached_files(tokenizer, start.data.chat_template)
        self._start_or_resume()
        self._load_data()
        log_start = Start(
            run=self.run,
            step=self.step,
            steps=config.training.steps,
            values=config.as_dict(),
            logging=config.logging,
            console=console or Console(markup=False),
        )
        template = start.data.chat_template
        extra_files = {} if template is None else {CHAT_TEMPLATE_JINJA: template}
        self._logs = Loggers(log_start, extra_files, is_writer=grid.is_main)
        self._logs.open(step=self.step)
        if self.step:
            logger.info("continuing after step %d of %s", self.step, self.run)

    def train(self) -> None:
        """Train until the last step, or until a reason to stop.

        Raises:
            Interrupted: a signal came before the end; a checkpoint was saved.
            DivergenceError: the loss or the gradient norm is not finite, and recovery has failed.
        """
        with signals_to(self._listener.note_signal), manual_gc():
            if self._start.resumed is not None:
                self._saves.copy_to_mirror(self.step)  # not earlier: from here on, `close` is sure to end the copying
            stop_reason: StopReason | None = None
            notice: str | None = None
            while not (stop_reason or self._is_over):
                stop_reason = self.take_step()
                if notice is None and (notice := attention_notice(self.config, self.grid)):
                    logger.warning("%s", notice)
            self._saves.finish_copies(was_stopped=stop_reason == "signal")
            if stop_reason == "signal":
                raise Interrupted(f"stopped after step {self.step}, saved; run the same command to continue")
            if stop_reason:
                logger.info("step %d  ended and saved, as training.%s asks", self.step, stop_reason)
            else:
                steps, tokens = self.config.training.steps, self.consumed_tokens
                logger.info("complete: %s steps, %s tokens, in %s", f"{steps:,}", f"{tokens:,}", self.run)

    def take_step(self) -> StopReason | None:
        """Train one step and do all that is due after it; return the reason to stop now, or None."""
        with self.profiler.recording(self.step + 1):
            metrics = self._train_one_step()
        if self._bad_steps.limit_reached:
            self._go_back()
            return "signal" if self._interrupts.stop else None  # no save: the checkpoint just loaded has this state
        for callback in (*self._callbacks, self._source_counter):
            metrics.update(callback.after_step(self.step, is_skipped="skipped" in metrics))
        try:
            metrics.update(self._evaluate_if_due())
        finally:  # also if the evaluation ends the run with an error
            self._logs.write(self.step, metrics)
        stop_reason = self._stop_reason()
        if self._save_if_due(force=stop_reason is not None or self._interrupts.save):
            stop_reason = stop_reason or self._stop_reason()  # a request may have come during the save
        self._saves.publish_if_written(self.step, blocking=stop_reason is not None or self._is_over)
        return stop_reason

    def close(self, *, failed: bool = False) -> None:
        """Close the profile and the logs, and abort an unfinished save; `failed`: the run ends with an error."""
        self.profiler.close(self.step, failed=failed)
        self._saves.close()
        self._batches.close()
        drop_gradient_hooks(self._wrapped)
        self._logs.close(failed=failed)

    # -- one step

    def _train_one_step(self) -> dict[str, Any]:
        """Compute the next step and update the weights, or skip the step; return its metrics."""
        started = time.monotonic()
        self.step += 1
        for callback in (*self._callbacks, self._source_counter):
            callback.begin_step(self.step)
        self._scheduler.step(1)  # sets the rate of this step
        batches = StepBatches(self._batches, self._num_micro_batches)
        self.consumed_samples += self.config.training.global_batch_size
        if reason := self._bad_steps.reason_to_skip(self.step):
            batches.skip()
            self._interrupts = self._listener.shared(self.grid)
            return self._record_skip(reason)
        result, fault = self._compute(batches)
        self._interrupts = result.interrupts
        if fault is not None:
            self._bad_steps.note_bad(self.step, fault)
            return self._record_skip(fault)
        if result.tokens == 0:
            return self._record_skip("its samples have no learned token")
        update_weights(self._optimizer, result.grad_norm)
        self._bad_steps.note_good(self.step, result.loss, result.grad_norm)
        return {
            **self._step_metrics.compute(
                result,
                seconds=time.monotonic() - started,
                learning_rate=self._optimizer.param_groups[0]["lr"],
                consumed_tokens=self.consumed_tokens,
            ),
            **self._events.totals(),
        }

    def _compute(self, batches: StepBatches) -> tuple[StepResult, str | None]:
        """Compute the step; if its numbers are bad, compute it again, which helps if a machine was at fault.

        The gradients stay in the buffers. Return the last numbers, and the fault in them, if any.
        """
        result, fault = self._attempt(batches)
        if fault is None or not self.config.recovery.compute_again:
            return result, fault
        result, second_fault = self._attempt(batches)
        logger.info("step %d  %s; computed again, %s", self.step, fault, second_fault or "is good")
        self._events.add("computed_again", self.step, first=fault, second=second_fault)
        return result, second_fault

    def _attempt(self, batches: StepBatches) -> tuple[StepResult, str | None]:
        arguments = (self._wrapped, self._optimizer, iter(batches), self.grid, self._num_micro_batches)
        with ExitStack() as contexts:
            for callback in self._callbacks:
                contexts.enter_context(callback.around_attempt(self.step))
            result = attempt_step(*arguments, listen=self._listener.pending)
        return result, self._bad_steps.fault_in(result.loss, result.grad_norm)

    def _record_skip(self, reason: str) -> dict[str, Any]:
        """Record that the current step is skipped, and return its metrics."""
        logger.info("step %d  skipped: %s", self.step, reason)
        self._skipped_steps.add(self.step)
        self._events.add("skipped", self.step, reason=reason)
        return {
            "skipped": reason,
            "learning_rate": self._optimizer.param_groups[0]["lr"],
            "tokens": self.consumed_tokens,
            **self._events.totals(),
        }

    def _go_back(self) -> None:
        """Go back to the last checkpoint before the bad steps, and skip these steps from now on.

        Raises:
            DivergenceError: there is no such checkpoint, or the run has gone back too often.
        """
        self._saves.publish_if_written(self.step, blocking=True)
        faults = self._bad_steps.in_a_row
        first, last = min(faults), max(faults)
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        names = on_main(lambda: [path.name for path in run_folder.checkpoints_to_resume(self.run)])
        checkpoint_of_first = run_folder.checkpoint_name(first)  # names sort by step
        earlier = [self.run / run_folder.CHECKPOINTS / name for name in names if name < checkpoint_of_first]
        refusal = self._bad_steps.rewind_refusal if earlier else "there is no checkpoint to go back to"
        if refusal is not None:
            raise DivergenceError(
                f"{steps}: {faults[last]}, and {refusal}; lower optimizer.lr, or inspect the steps' documents"
            )
        skipped = self._bad_steps.note_rewind()
        self._resume(earlier)
        self._events.add("rewound", self.step, skipped=skipped)
        self._load_data()
        self._logs.open(step=self.step)
        logger.info("%s: %s; went back to step %d, and will skip them", steps, skipped[last], self.step)

    # -- evaluation, saves, the end

    def _evaluate_if_due(self) -> dict[str, float]:
        if not self._evaluation.is_due(self.step):
            return {}
        try:
            with gathered_weights(self._wrapped):
                metrics = self._evaluation.measure(self.step, self._wrapped, self._data.valid)
        except (DivergenceError, InputError):  # raised on all ranks
            self._saves.publish_if_written(self.step, blocking=True)  # a checkpoint of an earlier step, which is sound
            raise
        self._update_interrupts()
        return metrics

    def _save_if_due(self, *, force: bool) -> bool:
        """Save a checkpoint if one is due, at the end of the run, or if `force`; return whether one was saved."""
        # After a bad step the weights are unchanged, and the run may go back to a checkpoint before it.
        interval = None if self._bad_steps.in_a_row else self.config.checkpoint.save_interval
        if not (is_due(self.step, interval) or force or self._is_over):
            return False
        on_main(self._start.data.refuse_changed_files)  # else the checkpoint would name other data than it has read
        with gathered_weights(self._wrapped):
            self._saves.save(
                self.step,
                stages=self._stages,
                optimizer=self._optimizer,
                progress={
                    "step": self.step,
                    "consumed_samples": self.consumed_samples,
                    "medians": self._bad_steps.medians(),
                    "skipped": sorted(self._skipped_steps),
                    "sources": self._source_counter.totals_after(self.step),
                    "data": self._start.identity.as_plain(),
                },
                config=self.config.as_dict(),
                attachments=self._attachments,
            )
        self._update_interrupts()
        return True

    def _update_interrupts(self) -> None:
        """Add requests to stop or end that came during an evaluation or a save: they must not wait for another step."""
        new = self._listener.shared(self.grid)
        self._interrupts = self._interrupts._replace(
            stop=self._interrupts.stop or new.stop, end=self._interrupts.end or new.end
        )

    @property
    def consumed_tokens(self) -> int:
        """Number of tokens in all samples so far, those of skipped steps included."""
        return self.consumed_samples * self.config.model.seq_length

    @property
    def _is_over(self) -> bool:
        return self.step >= self.config.training.steps

    def _stop_reason(self) -> StopReason | None:
        """Return why the run ends early, after this step, equal on all ranks; None: continue, or the run is over."""
        if self._is_over:
            return None
        if self._interrupts.stop:
            return "signal"
        if self._interrupts.end:
            return "exit_duration_in_mins"
        return "exit_interval" if is_due(self.step, self.config.training.exit_interval) else None

    # -- the start

    def _log_startup(self, notices: list[str]) -> None:
        grid = self.grid
        logger.debug(
            "rank %d of %d, replica %d, on %s", grid.rank, grid.world_size, grid.data_parallel_rank, grid.device
        )
        parameters, steps = self.config.model.num_parameters, self.config.training.steps
        logger.info("a model of %s parameters, %s steps, in %s", f"{parameters:,}", f"{steps:,}", self.run)
        for line in notices:
            logger.info("%s", line)

    def _build(self) -> None:
        """Build model, optimizer and scheduler; the model has initial weights unless there is a checkpoint to load."""
        config, grid, loaded = self.config, self.grid, self._start.loaded
        has_checkpoint = bool(self._start.resumed or loaded)
        self._stages = build_stages(
            config.model,
            config.parallel,
            grid,
            dtype=config.dtype(grid.device),
            seed=None if has_checkpoint else config.training.seed,
            precision=config.precision,
            kernels=config.kernels,
            z_loss_coefficient=config.training.z_loss_coefficient,
        )
        if loaded:
            from megatron_fanformer.checkpoint.training_state import load_weights  # slow to import

            logger.debug("loading the weights of %s", loaded)
            load_weights(loaded, self._stages, grid)
        self._wrapped = wrap_stages(
            self._stages, config.parallel, grad_reduce_in_fp32=config.precision.grad_reduce_in_fp32
        )
        self._optimizer = build_optimizer(config.optimizer, self._wrapped)
        self._scheduler = self._build_scheduler()

    def _build_scheduler(self) -> Any:
        return build_scheduler(
            self.config.schedule, self._optimizer, self.config.optimizer, train_iters=self.config.training.steps
        )

    def _start_or_resume(self) -> None:
        past_events = list(self._start.events)
        self._events = EventLog(self.run, past_events, is_writer=self.grid.is_main)
        self._bad_steps = BadSteps(self.config.recovery, past_events)
        self._skipped_steps: set[int] = set()  # up to the current step; going back drops the later ones
        self._source_totals: SourceTotals | None = None  # of the checkpoint that was loaded
        if self._start.resumed is None:
            self._events.mark_new_run()
        else:
            self._resume(list(self._start.candidates), self._start.damaged)

    def _resume(self, candidates: list[Path], known_damaged: Damaged = ()) -> None:
        """Load the first sound checkpoint of `candidates`, and set the damaged ones aside.

        Args:
            known_damaged: newer checkpoints that are damaged, and the damage of each.

        Raises:
            CorruptError: all candidates are damaged; or the first is, and `recovery.use_earlier_checkpoint` is false.
        """
        damaged = list(known_damaged)
        for checkpoint in candidates:
            try:
                self._load_checkpoint(checkpoint)
                break
            except CorruptError as error:
                damaged.append((checkpoint, error))
                # UnreadableError: the checksums are right, but the library fails, as it would on earlier checkpoints.
                if not self.config.recovery.use_earlier_checkpoint or isinstance(error, UnreadableError):
                    raise
        else:
            raise damaged[0][1]
        on_main(lambda: run_folder.point_to(checkpoint, [path for path, _ in damaged]))
        for path, reason in damaged:
            logger.warning("%s; it is set aside, and the run goes on from %s", reason, checkpoint.name)
            self._events.add("earlier_checkpoint", self.step, damaged=path.name, reason=str(reason))
        logger.debug("loaded %s", checkpoint)

    def _load_checkpoint(self, checkpoint: Path) -> None:
        from megatron_fanformer.checkpoint.training_state import load_training_state  # slow to import

        with gathered_weights(self._wrapped):
            progress = load_training_state(
                checkpoint,
                stages=self._stages,
                optimizer=self._optimizer,
                grid=self.grid,
                resumed_entries=self.config.optimizer.rule.resumed_entries,
            )
        self.step, self.consumed_samples = progress["step"], progress["consumed_samples"]
        self._bad_steps.set_medians(progress.get("medians", {}))
        self._skipped_steps = set(progress.get("skipped", ()))
        self._source_totals = progress.get("sources")
        self._scheduler = self._build_scheduler()
        self._scheduler.step(self.step)

    def _load_data(self) -> None:
        self._data = run_datasets(self.config, self._start.data)
        self._source_counter = SourceCounter(
            self.config, self._start.data, self._data, self._skipped_steps, step=self.step, totals=self._source_totals
        )
        self._batches = read_batches(
            self.config, self.grid, self._data.train, consumed_samples=self.consumed_samples, for_training=True
        )
