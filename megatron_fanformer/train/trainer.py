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
from megatron_fanformer.train.callbacks import Callback, Garbage, SeenSources, StepMetrics, Stragglers
from megatron_fanformer.train.config import RunConfig
from megatron_fanformer.train.evaluation import Evaluation
from megatron_fanformer.train.interrupts import InterruptListener, Interrupts, share
from megatron_fanformer.train.loggers import Loggers
from megatron_fanformer.train.machine_choices import attention_notice, choose_for_machine
from megatron_fanformer.train.optimizer import build_optimizer
from megatron_fanformer.train.phase_health import PhaseHealth
from megatron_fanformer.train.preflight import RunStart, find_start, with_train_iters
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
    update_weights,
    weights_in_step,
    wrap_stages,
)

Stopping = Literal["signal", "exit_interval", "exit_duration_in_mins"]

logger = logging.getLogger(__name__)


class Trainer:
    """A run on this rank. Every rank makes one and calls `train`; `close` afterwards.

    Args:
        start: the run's starting point; None: rank 0 finds it now.
        console: the terminal, which rank 0 writes to.
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
        self._interrupts = Interrupts()  # of any rank, at the end of the current step
        seed_everything(config.training.seed, graphable=config.kernels.cuda_graph_impl != "none")
        self._build()
        self._saves = Checkpointer(config, grid, self._listener, note_saved=lambda: self._bad_steps.note_saved())
        self._num_micro_batches = config.num_micro_batches(grid.data_parallel_size)
        self._evaluation = Evaluation(config, start.evaluation, grid, lambda: share(self._listener.now(), grid).stop)
        logged = config.logging
        self.profiler = Profiler(logged, grid, self.run)
        self._step_metrics = StepMetrics(config, grid, self._optimizer)
        # What a CUDA graph runs is called from Python when it is captured, and never again.
        phase_interval = logged.phase_interval if config.kernels.cuda_graph_impl == "none" else None
        self._callbacks: list[Callback] = [
            PhaseHealth(self._stages, config.model, grid, interval=phase_interval),
            self._step_metrics,
            Stragglers(self._wrapped, grid, interval=logged.norm_interval),
            Garbage(),
        ]
        self._attachments: dict[str, bytes] = {}
        if grid.is_main:  # which publishes checkpoints
            tokenizer = tokenizer_file(config.data.tokenizer) if config.data.tokenizer else None
            self._attachments = attached_files(tokenizer, start.data.chat_template)
        self._start_or_resume()
        self._load_data()
        self._logs = Loggers(
            logged,
            console or Console(markup=False),
            run=self.run,
            steps=config.training.steps,
            writes=grid.is_main,
        )
        self._open_logs()
        if self.step:
            logger.info("continuing after step %d of %s", self.step, self.run)

    def train(self) -> None:
        """Run to the last step.

        Raises:
            Interrupted: a signal came before the end; the checkpoint is saved.
            DivergenceError: the loss or the gradient norm is not finite.
        """
        with signals_to(self._listener.note_signal), manual_gc():
            if self._start.resumed is not None:
                self._saves.copy(self.step)  # here, as its process is ended by `close`, which follows for sure
            stopping: Stopping | None = None
            notice: str | None = None
            while not (stopping or self._is_over):
                stopping = self.take_step()
                if notice is None and (notice := attention_notice(self.config, self.grid)):
                    logger.warning("%s", notice)
            self._saves.finish_copies(was_stopped=stopping == "signal")
            if stopping == "signal":
                raise Interrupted(f"stopped after step {self.step}, saved; run the same command to continue")
            if stopping:
                logger.info("step %d  ended and saved, as training.%s asks", self.step, stopping)
            else:
                steps, tokens = self.config.training.steps, self.consumed_tokens
                logger.info("complete: %s steps, %s tokens, in %s", f"{steps:,}", f"{tokens:,}", self.run)

    def take_step(self) -> Stopping | None:
        """Train one step and do all that is due after it; return the reason to end now, or None."""
        with self.profiler.recording(self.step + 1):
            metrics = self._train_one_step()
        if self._bad_steps.limit_reached:
            self._go_back()
            return "signal" if self._interrupts.stop else None
        for callback in (*self._callbacks, self._seen):
            metrics.update(callback.after_step(self.step, is_skipped="skipped" in metrics))
        try:
            metrics.update(self._evaluate_if_due())
        finally:  # where its evaluation ends the run, too
            self._logs.write(self.step, metrics)
        stopping = self._shall_stop()
        if self._save_if_due(force=stopping is not None or self._interrupts.save):
            stopping = stopping or self._shall_stop()
        self._saves.publish_if_written(self.step, blocking=stopping is not None or self._is_over)
        return stopping

    def close(self, *, failed: bool = False) -> None:
        """Close logs and progress (`failed`: as an error's), free the model; abort the writing of a checkpoint."""
        self.profiler.close(self.step, failed=failed)
        self._saves.close()
        self._batches.close()
        drop_gradient_hooks(self._wrapped)
        self._logs.close(failed=failed)

    # -- one step

    def _train_one_step(self) -> dict[str, Any]:
        """Take the next step, or skip it, and return its metrics."""
        started = time.monotonic()
        self.step += 1
        for callback in (*self._callbacks, self._seen):
            callback.begin_step(self.step)
        self._scheduler.step(1)
        batches = StepBatches(self._batches, self._num_micro_batches)
        self.consumed_samples += self.config.training.global_batch_size
        if reason := self._bad_steps.reason_to_skip(self.step):
            batches.skip()
            self._interrupts = share(self._listener.now(), self.grid)
            return self._skipped(reason)
        result, fault = self._compute(batches)
        self._interrupts = result.interrupts
        if fault is not None:
            self._bad_steps.note_bad(self.step, fault)
            return self._skipped(fault)
        if not result.tokens:  # of all ranks
            return self._skipped("its samples have no learned token")
        update_weights(self._optimizer, result.grad_norm)
        self._bad_steps.note_good(self.step, result.loss, result.grad_norm)
        return {
            **self._step_metrics.of_step(
                result,
                seconds=time.monotonic() - started,
                learning_rate=self._optimizer.param_groups[0]["lr"],
                consumed_tokens=self.consumed_tokens,
            ),
            **self._events.totals(),
        }

    def _compute(self, batches: StepBatches) -> tuple[StepResult, str | None]:
        """Compute the step, and once more if its numbers are bad: a machine's fault is not there the second time.

        The gradients stay in the buffers. Return the last numbers, and their fault.
        """
        result, fault = self._attempt(batches)
        if fault is None or not self.config.recovery.compute_again:
            return result, fault
        result, second_fault = self._attempt(batches)
        logger.info("step %d  %s; computed again, %s", self.step, fault, second_fault or "is good")
        self._events.add("computed_again", self.step, first=fault, second=second_fault)
        return result, second_fault

    def _attempt(self, batches: StepBatches) -> tuple[StepResult, str | None]:
        parts = (self._wrapped, self._optimizer, iter(batches), self.grid, self._num_micro_batches)
        with ExitStack() as contexts:
            for callback in self._callbacks:
                contexts.enter_context(callback.around_attempt(self.step))
            result = attempt_step(*parts, listen=self._listener.now)
        return result, self._bad_steps.fault_in(result.loss, result.grad_norm)

    def _skipped(self, reason: str) -> dict[str, Any]:
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
        """Go back to the last checkpoint before the bad steps, and skip them from now on.

        Raises:
            DivergenceError: there is none, or the run has gone back too often.
        """
        self._saves.publish_if_written(self.step, blocking=True)
        bad = self._bad_steps.in_a_row
        first, last = min(bad), max(bad)
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        names = on_main(lambda: [path.name for path in run_folder.checkpoints_to_resume(self.run)])
        checkpoint_of_first = run_folder.checkpoint_name(first)
        earlier = [self.run / run_folder.CHECKPOINTS / name for name in names if name < checkpoint_of_first]
        refusal = self._bad_steps.rewind_refusal if earlier else "there is no checkpoint to go back to"
        if refusal is not None:
            raise DivergenceError(
                f"{steps}: {bad[last]}, and {refusal}; lower optimizer.lr, or inspect the steps' documents"
            )
        skipped = self._bad_steps.note_rewind()
        self._resume(earlier)
        self._events.add("rewound", self.step, skipped=skipped)
        self._load_data()
        self._open_logs()
        logger.info("%s: %s; went back to step %d, and will skip them", steps, skipped[last], self.step)

    # -- evaluation, saves, the end

    def _evaluate_if_due(self) -> dict[str, float]:
        if not self._evaluation.is_due(self.step):
            return {}
        try:
            with weights_in_step(self._wrapped):
                metrics = self._evaluation.metrics(self.step, self._wrapped, self._data.valid)
        except (DivergenceError, InputError):  # on all ranks alike
            self._saves.publish_if_written(self.step, blocking=True)  # of an earlier step, and sound
            raise
        self._share_again()
        return metrics

    def _save_if_due(self, *, force: bool) -> bool:
        interval = self.config.checkpoint.save_interval
        due = interval is not None and self.step % interval == 0
        if self._bad_steps.in_a_row:
            due = False  # nothing has changed, and the run may go back to before them
        if not (due or force or self._is_over):
            return False
        on_main(self._start.data.refuse_changed_files)
        with weights_in_step(self._wrapped):
            self._saves.save(
                self.step,
                stages=self._stages,
                optimizer=self._optimizer,
                progress={
                    "step": self.step,
                    "consumed_samples": self.consumed_samples,
                    "medians": self._bad_steps.medians(),
                    "skipped": sorted(self._skipped_steps),
                    "sources": self._seen.after(self.step),
                    "data": self._start.identity.as_plain(),
                },
                config=self.config.as_dict(),
                attachments=self._attachments,
            )
        self._share_again()
        return True

    def _share_again(self) -> None:
        """Share again what came during an evaluation or a save, so that it need not wait for another step."""
        new = share(self._listener.now(), self.grid)
        self._interrupts = self._interrupts._replace(
            stop=self._interrupts.stop or new.stop, end=self._interrupts.end or new.end
        )

    @property
    def consumed_tokens(self) -> int:
        """Tokens of all samples so far."""
        return self.consumed_samples * self.config.model.seq_length

    @property
    def _is_over(self) -> bool:
        return self.step >= self.config.training.steps

    def _shall_stop(self) -> Stopping | None:
        """Return why to end after this step, the same on all ranks; None to continue."""
        if self._is_over:
            return None
        if self._interrupts.stop:
            return "signal"
        if self._interrupts.end:
            return "exit_duration_in_mins"
        interval = self.config.training.exit_interval
        return "exit_interval" if interval is not None and self.step % interval == 0 else None

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
        config, grid, loaded = self.config, self.grid, self._start.loaded
        is_drawn = not (self._start.resumed or loaded)  # else the weights are about to be loaded
        self._stages = build_stages(
            config.model,
            config.parallel,
            grid,
            dtype=config.dtype(grid.device),
            seed=config.training.seed if is_drawn else None,
            precision=config.precision,
            kernels=config.kernels,
            z_loss_coefficient=config.training.z_loss_coefficient,
        )
        if loaded:
            from megatron_fanformer.checkpoint.training_state import load_weights  # as in `Checkpointer._saver`

            logger.debug("loading the weights of %s", loaded)
            load_weights(loaded, self._stages, grid)
        in_fp32 = config.precision.grad_reduce_in_fp32
        self._wrapped = wrap_stages(self._stages, config.parallel, grad_reduce_in_fp32=in_fp32)
        self._optimizer = build_optimizer(config.optimizer, self._wrapped)
        self._scheduler = self._build_scheduler()

    def _build_scheduler(self) -> Any:
        config = self.config
        return build_scheduler(config.schedule, self._optimizer, config.optimizer, train_iters=config.training.steps)

    def _start_or_resume(self) -> None:
        past = list(self._start.events)
        self._events = EventLog(self.run, past, writes=self.grid.is_main)
        self._bad_steps = BadSteps(self.config.recovery, past)
        self._skipped_steps: set[int] = set()  # of this run as it stands, without what it went back over
        self._resumed_sources: dict[str, dict[str, float]] | None = None
        if self._start.resumed is None:
            self._events.begin()
        else:
            self._resume(list(self._start.candidates), list(self._start.damaged))

    def _resume(self, candidates: list[Path], damaged: list[tuple[Path, CorruptError]] | None = None) -> None:
        """Go on from the first of some checkpoints that is not damaged; those that are, are set aside.

        Args:
            damaged: newer ones, and the damage of each.

        Raises:
            CorruptError: all are, or the first is and no other is to be used.
        """
        damaged = [] if damaged is None else damaged
        for checkpoint in candidates:
            try:
                self._load_checkpoint(checkpoint)
                break
            except CorruptError as error:
                damaged.append((checkpoint, error))
                # a library that fails on one, whose sums are right, fails on the earlier ones, too
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
        from megatron_fanformer.checkpoint.training_state import load_training_state  # as in `Checkpointer._saver`

        with weights_in_step(self._wrapped):
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
        self._resumed_sources = progress.get("sources")
        self._scheduler = self._build_scheduler()
        self._scheduler.step(self.step)

    def _load_data(self) -> None:
        self._data = run_datasets(self.config, self._start.data)
        self._seen = SeenSources(
            self.config,
            self._start.data,
            self._data,
            self._skipped_steps,
            step=self.step,
            seen=self._resumed_sources,
        )
        self._batches = read_batches(
            self.config, self.grid, self._data.train, consumed_samples=self.consumed_samples, for_training=True
        )

    def _open_logs(self) -> None:
        template = self._start.data.chat_template
        beside = {} if template is None else {CHAT_TEMPLATE_JINJA: template}
        self._logs.open(self.config.as_dict(), step=self.step, beside=beside)
