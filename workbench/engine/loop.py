"""The training loop of one rank."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from workbench.corpora import tokenized_corpus
from workbench.engine.data.batch_feed import BatchFeed
from workbench.engine.data.batch_sampler import Batch, BatchContents
from workbench.engine.data.batch_sampler import BatchSampler as TextSampler
from workbench.engine.data.conversation_sequences import ConversationSequences
from workbench.engine.garbage_collection import collected_on_common_steps
from workbench.engine.measure.allocator_memory import memory_meter
from workbench.engine.measure.experiment_trackers import Trackers
from workbench.engine.measure.own_time import OwnClock, PhaseTimes
from workbench.engine.measure.step_sampler import (
    FIRST_SAMPLES,
    ActionTracker,
    SampledStep,
    StepSampler,
    allocated_rows,
    observed_by,
)
from workbench.engine.measure.step_timeline import StepTimeline
from workbench.engine.measure.step_under_way import HostCopy, StepUnderWay
from workbench.engine.measure.telemetry_writer import TelemetryWriter
from workbench.engine.optimizer.loss_scaler import STUCK_STEPS
from workbench.engine.preference_pass import needs_reference_table, num_pairs, reward_record
from workbench.engine.process_group.collective_deadlines import extend_deadlines, restore_deadlines
from workbench.engine.reference_file import read_reference, reference_identity, write_reference
from workbench.engine.reference_table import ReferenceTable
from workbench.engine.session import Session, StepResult, initial_drawer, rank_share
from workbench.engine.session_checkpoint import SessionCheckpointer
from workbench.engine.source_losses import SequenceSources
from workbench.engine.verify.finite_check import NotFiniteError, gather_parts, origin
from workbench.errors import refuse
from workbench.parallel.mesh import Mesh
from workbench.parallel.tensor.apply_tensor import counts_own_loss
from workbench.plan.learning_rate import learning_rate
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.task.task_words import naming_task, words_of_task
from workbench.planned_device import tensor_device
from workbench.runs.store.stop_request import read_stop
from workbench.runtime_facts.phase_deadlines import SLOW_FACTOR
from workbench.units import bytes_text

GO_ON, STOP, SAVE_AND_STOP = 0, 1, 2


def runs_ahead(session: Session) -> bool:
    """Whether the host enqueues a step before it has read the last one's scalars, so that a GPU
    never waits for it. A stop request then takes effect a step later. Loss scaling needs to know
    whether a step was skipped before the next one; on CPU there is nothing to run ahead of.
    """
    return session.device.type == "cuda" and session.scaler is None


class TrainingLoop:
    """Builds this rank's session and trains it.

    `index` is the current step, `action_tracker` knows its current action.
    """

    def __init__(
        self,
        plan: ResolvedPlan,
        run_dir: Path,
        mesh: Mesh,
        accelerator: Accelerator,
        telemetry: TelemetryWriter,
    ) -> None:
        self.plan, self.run_dir, self.mesh, self.telemetry = plan, run_dir, mesh, telemetry
        self.action_tracker = ActionTracker()
        self.index = self.first = 0
        device = tensor_device(accelerator.device)
        self._clock, self._own_since = OwnClock(), 0.0
        self.meter = memory_meter(device)
        self.trackers = Trackers(accelerator, plan)
        self._phase("building")
        self._extend_deadlines()
        self._recorded: dict[str, int] = {}
        with naming_task(plan):
            self.text = self._text()
        self._samples: list[SampledStep] = []
        self._window_open = False
        self._open_window()
        self.session = Session.build(plan, mesh, device, drawer=initial_drawer(plan))
        share, length = self.session.share, plan.training.sequence_length
        shape = (share.microbatches, share.sequences, length)
        self.feed = BatchFeed(self.text, shape, device, plan.telemetry.timeout_seconds)
        self._under_way: list[StepUnderWay] = []
        self._last_end = 0.0
        self.references = ReferenceTable(self.text, self._reference, device, self._referring)
        if device.type == "cpu":
            self.session.on_result = self._check_result
        self.saver = SessionCheckpointer(self.session, run_dir, self._saved)
        self._unsaved: ValueError | None = None
        if plan.saves_at_end:
            self.saver.prepare()

    def _text(self) -> TextSampler:
        t, share = self.plan.training, rank_share(self.plan, self.mesh)
        deadline = SLOW_FACTOR * self.plan.telemetry.timeout_seconds
        corpus = tokenized_corpus.load_corpus(
            self.plan.corpus, self.plan.vocab, deadline=deadline, progress=self._tokenizing
        )
        packing = bool(self.plan.corpus.packing)
        text = TextSampler(corpus, t.sequence_length, t.global_batch, share, t.seed, packing)
        for one, sequences in zip(text.sources, text.sequences("train"), strict=True):
            if isinstance(sequences, ConversationSequences):
                self._phase("building", f"{one.source}: {sequences.report}")
        if t.evaluation.every:
            # Refuse held-out text that is too short now, not at the first evaluation.
            text.evaluation(0)
        return text

    def _tokenizing(self, done: int, of: int, source: str) -> None:
        """Record how much of a source is encoded, at every percent."""
        share = int(100 * done / max(1, of))
        if share > self._recorded.get(source, 0):
            self._recorded[source] = share
            self._phase("building", f"tokenizing {source}, {min(share, 100)} %")

    def _loading(self, done: int, of: int) -> None:
        """Record how many bytes this rank has loaded, at every percent."""
        share, source = int(100 * done / max(1, of)), str(self.plan.checkpoint.load)
        if share > self._recorded.get(source, 0):
            self._recorded[source] = share
            self._phase("building", f"loading weights, {bytes_text(done)} of {bytes_text(of)}")

    def run(self) -> None:
        """Train from the checkpoint's step, or from 0, to the last step or a stop request."""
        self.index = self._load()
        for kernel in self.session.warm_up():
            self._phase("compiling", kernel)
        if not self._compiles_in_first_step:
            self._restore_deadlines()
        self.first = self.index
        self._phase("training")
        with self._clock.watching(), collected_on_common_steps() as collect:
            while self.index < self.plan.training.steps:
                if self.index - self.first >= FIRST_SAMPLES:
                    self._end_window()
                self._enqueue()
                collect(self.index)
                stopping = self._finish_steps(but=int(self._may_run_ahead()))
                if stopping != GO_ON:
                    stopping = max(stopping, self._finish_steps())
                self._evaluate()
                self._save(stopping == SAVE_AND_STOP)
                if stopping != GO_ON:
                    break
        self._end_window()
        self._finish_saving()
        self.feed.close()
        self._phase("done")
        self.telemetry.record("bye", step=self.index)
        self._extend_deadlines()  # others wait for a rank whose tracker uploads
        self.trackers.close()

    def _load(self) -> int:
        """Load what the plan names, and compute a preference's reference where it is the weights
        that training starts from; returns the steps done.
        """
        if not needs_reference_table(self.plan) or self.plan.checkpoint.load is None:
            first = self.saver.load(self._loading)
            if needs_reference_table(self.plan):
                self._compute_references(first)
            return first
        # Resumed: the checkpoint's weights are no longer those.
        first = self.saver.load_base(self._loading)
        self._take_references(Path(self.plan.checkpoint.load).parent)
        self._compute_references(first)
        return self.saver.load(self._loading)

    def _take_references(self, folder: Path) -> None:
        """Take what the run whose checkpoints are in `folder` computed of the same reference."""
        identity, found = reference_identity(self.plan), {}
        if identity is not None and self.mesh.rank == 0:
            found = read_reference(folder, identity)
        for part in self._reference_parts:
            self.references.take(part, found.get(part))

    def _save_references(self) -> None:
        """Leave the reference beside the checkpoints, for runs that resume; without it they compute
        it again.
        """
        identity = reference_identity(self.plan)
        if identity is None or self.mesh.rank:
            return
        try:
            write_reference(self.run_dir / "checkpoints", identity, self.references.log_probs)
        except OSError as error:
            print(f"reference: a resumed run computes it again: {error}", file=sys.stderr)

    @property
    def _reference_parts(self) -> list[str]:
        return ["train", "holdout"] if self.plan.training.evaluation.every else ["train"]

    def _compute_references(self, first: int) -> None:
        """Compute log-probabilities of the pairs of steps from `first`, and of held-out ones, by
        the weights that are loaded.
        """
        text, e = self.text, self.plan.training.evaluation
        steps = map(text.step_numbers, range(self.plan.training.steps))
        self.references.compute("train", steps, first)
        if e.every:
            sources: list[int | None] = [None]
            sources += range(len(text.sources)) if len(self.plan.corpus.mix or []) > 1 else ()
            each = itertools.product(range(e.batches), sources)
            self.references.compute("holdout", itertools.starmap(text.evaluation_numbers, each))
        self._save_references()

    def _reference(self, part: str, numbers: np.ndarray) -> Tensor | None:
        """What the reference says of a batch's sequences; None on stages without the head."""
        batch = self.feed.load_numbered(part, numbers)
        log_probs_MB = self.session.reference_log_probs(*batch[:2])
        return None if self.session.part.head is None else log_probs_MB

    def _referring(self, done: int, of: int) -> None:
        """Record how many batches the reference has seen, at every percent."""
        share = 100 * done // of
        if share > 100 * (done - 1) // of:
            self._phase("building", f"log-probabilities of the reference, {share} %")

    def _set_reference(self, part: str, batch: int, source: int | None = None) -> None:
        """Give the session the reference of a batch, where it was computed beforehand."""
        if not needs_reference_table(self.plan):
            return
        text, train = self.text, part == "train"
        numbers = text.step_numbers(batch) if train else text.evaluation_numbers(batch, source)
        self.session.set_reference(self.references.get(part, numbers))

    def _observed(self) -> str:
        """What is measured of the step at `index`."""
        return observed_by(self.index - self.first, self.plan.telemetry.memory_every)

    def _may_run_ahead(self) -> bool:
        """Whether the step at `index` may be enqueued before the last one's scalars are read. What
        is evaluated or saved comes from steps known to be good, and a step that is measured has the
        device for itself.
        """
        t, every = self.plan.training, self.plan.checkpoint.every
        due = self.index == t.steps or any(
            often and self.index % often == 0 for often in (t.evaluation.every, every)
        )
        measured = self._observed() or self._under_way[-1].timeline is not None
        return runs_ahead(self.session) and not due and not measured

    def _enqueue(self) -> None:
        """Enqueue the step at `index`, and count it."""
        observed = self._observed()
        began, cpu_began = time.perf_counter(), time.process_time()
        phases = PhaseTimes(self._clock, self._own_since)
        phases.enter("data loading")
        batch = self.feed.load(self.index)
        data_seconds = time.perf_counter() - began
        self._set_reference("train", self.index)
        asked = self._asked_to_stop()
        self.meter.begin_step()
        with self._tracking(observed, batch):
            self.action_tracker.phases = phases
            phases.enter("other")
            contents = self.feed.contents
            assert contents is not None
            tokens: list[int] = contents.trained_tokens.tolist()
            sources = self._sources(contents)
            tracker, all_tokens = self.action_tracker, sum(tokens)
            result = self.session.step(
                self.index, *batch[:2], tracker, asked, all_tokens, sources, batch.starts
            )
        timeline = tracker if isinstance(tracker, StepTimeline) else None
        counters = self.meter.end_step(observed == "memory")
        if observed == "memory":
            self._samples[-1].counters = counters
        scalars = HostCopy(torch.cat([x.reshape(-1) for x in result if x is not None]))
        action = self.action_tracker.current
        phases.enter("other")
        self._own_since = phases.since
        bytes_now = self.meter.now()
        self._under_way.append(
            StepUnderWay(
                index=self.index,
                began=began,
                cpu_began=cpu_began,
                data_seconds=data_seconds,
                own_seconds=phases.seconds,
                tokens=tokens,
                scalars=scalars,
                bytes=bytes_now,
                counters=counters,
                action=action,
                timeline=timeline,
            )
        )
        self.index += 1

    @contextmanager
    def _tracking(self, observed: str, batch: Batch) -> Iterator[None]:
        """Within it `action_tracker` follows the step at `index`, and measures what is observed."""
        self.action_tracker = ActionTracker()
        if observed == "memory":
            self._open_window()
            self.action_tracker = sampler = StepSampler(self.session, self.meter)
            self._samples.append(SampledStep(self.index, sampler))
            with sampler.step(batch[:2]):
                yield
        elif observed == "timeline":
            self.action_tracker = timeline = StepTimeline(self.session)
            with timeline.step():
                yield
        else:
            yield

    def _finish_steps(self, but: int = 0) -> int:
        """Read and record the steps under way, `but` the newest so many; returns what all ranks
        agreed to do next.
        """
        stopping = GO_ON
        while len(self._under_way) > but:
            stopping = max(stopping, self._finish(self._under_way.pop(0)))
        return stopping

    def _finish(self, step: StepUnderWay) -> int:
        loss, norm, stop, *rest, own_loss = self._scalars(step)
        ended, cpu_ended = time.perf_counter(), time.process_time()
        if step.index == self.first and self._compiles_in_first_step:
            self._restore_deadlines()
        seconds, self._last_end = ended - max(step.began, self._last_end), ended
        on_cpu = self.session.device.type == "cpu"
        t, scaler = self.plan.training, self.session.scaler
        scheduled = step.index - (scaler.skipped if scaler else 0)
        scaling, parts = (rest[:2], rest[2:]) if scaler else ([], rest)
        pairs = self.session.preference is not None
        skipped = bool(scaler and scaling[1])
        if scaler:
            scaler.count_skipped(skipped, loss, scaling[0])
        self._check_finite(step.index, loss, norm, own_loss)
        record: dict[str, Any] = {
            "step": step.index,
            "loss": loss,
            "seconds": seconds,
            # On a GPU steps overlap on the host, and what it does beside them is no measure of one.
            "cpu_seconds": cpu_ended - step.cpu_began if on_cpu else None,
            "data_seconds": step.data_seconds,
            "own_seconds": step.own_seconds if on_cpu else None,
            "tokens": t.global_batch * t.sequence_length,
            "trained_tokens": sum(step.tokens),
            **(reward_record(parts) if pairs else self._by_source(parts, step.tokens)),
            "gradient_norm": norm,
            "learning_rate": learning_rate(scheduled, t.optimizer, t.steps),
            "loss_scale": scaling[0] if scaler else None,
            "skipped": skipped,
            "bytes": step.bytes,
            **step.counters.of_step(),
            "action": step.action,
        }
        self.telemetry.record("step", **record)
        self.trackers.log(record, step.index)
        if step.timeline is not None:
            self._record_timeline(step.index, step.timeline)
        return int(stop)

    def _check_result(self, result: StepResult) -> None:
        """Check a step's scalars before they reach the parameters: on CPU, where the host need not
        wait for them.
        """
        assert result.own_loss is not None
        found = (result.loss, result.gradient_norm, result.own_loss)
        self._check_finite(self.index, *(x.item() for x in found))

    def _check_finite(self, index: int, loss: float, norm: float, own_loss: float) -> None:
        """End training by a loss or norm that is not finite; under loss scaling, by several in a
        row that no lower scale makes finite.

        Raises:
            NotFiniteError: On every rank; names the one whose own part alone is not finite.
        """
        scaler = self.session.scaler
        if (
            math.isfinite(loss) and math.isfinite(norm)
            if scaler is None
            else (scaler.stuck < STUCK_STEPS)
        ):
            return
        self.index = index
        what = f"the loss of step {index} is {loss}"
        if math.isfinite(loss):
            what = f"the gradient norm of step {index} is {norm}"
        if scaler is not None:
            what += f", and no lower loss scale makes the last {scaler.stuck} steps finite (fp16)"
        ranks, where = origin(gather_parts(self.session, own_loss))
        remedy = "" if ranks else f"; {self._remedy}"
        text = f"{what}: {where}; training cannot continue{remedy}"
        self._report_unsaved(self.saver.wait)  # steps before were good: one resumes from the last
        raise NotFiniteError(words_of_task(text, self.plan), min(ranks, default=None))

    @property
    def _remedy(self) -> str:
        """Advice on numbers that grew too large on every rank."""
        ways, tune = ["lower training.optimizer.learning_rate"], self.plan.finetune
        if self.session.scaler:
            ways.append("take strategy.precision: bf16")
        if tune is not None and tune.base is not None:
            ways.append("check the weights that finetune.base names")
        elif self.plan.checkpoint.load is not None:
            ways.append("check the weights that checkpoint.load names")
        return ", or ".join(ways)

    def _record_timeline(self, index: int, timeline: StepTimeline) -> None:
        rows = timeline.timeline_rows()
        self.telemetry.record("timeline", step=index, rows=rows)
        rows = timeline.collective_rows()
        self.telemetry.record("collectives", step=index, rows=rows)

    def _sources(self, contents: BatchContents) -> SequenceSources | None:
        """Sources of the loaded step, where the corpus has several, and the head tells them apart:
        those of operators and grids do not know each token's loss.
        """
        s, count = self.plan.strategy, len(self.text.sources)
        sharded = bool(s.operators) or s.tensor.algorithm != "1d"
        pairs = self.session.preference is not None
        several = sharded and self.plan.training.micro_batch > 1
        if count == 1 or pairs or self.plan.code or several:
            return None
        return SequenceSources(contents.sources.tolist(), count)

    def _by_source(self, parts: list[float], tokens: list[int]) -> dict[str, Any]:
        """Loss a token of each source that the step has tokens of, by its part of the step's."""
        if not parts:
            return {}
        total = sum(tokens)
        rows = zip(self.text.sources, parts, tokens, strict=True)
        found = [
            {"source": one.source, "loss": part * total / own, "tokens": own}
            for one, part, own in rows
            if own
        ]
        return {"by_source": found}

    def _scalars(self, step: StepUnderWay) -> list[float]:
        """What a step computed; errors of a GPU come to light here, and are of that step."""
        try:
            return step.scalars.tolist()
        except Exception:
            self.index, self.action_tracker.current = step.index, "its GPU work"
            raise

    def _asked_to_stop(self) -> int:
        """The stop request on disk, read by rank 0 only; the step's all-reduce distributes it."""
        wish = read_stop(self.run_dir) if self.mesh.rank == 0 else None
        return GO_ON if wish is None else SAVE_AND_STOP if wish.checkpoint else STOP

    def _open_window(self) -> None:
        if not self._window_open:
            self.meter.start()
            self._window_open = True

    def _end_window(self) -> None:
        """Close the allocator's window, and record memory and collectives of its steps."""
        if not self._window_open:
            return
        self._window_open = False
        totals = allocated_rows(self.meter.stop(), self.session.first_stage)
        for sample, allocated in zip(self._samples, totals, strict=True):
            step, sampler = sample.step, sample.sampler
            rows = sample.memory_rows(allocated)
            self.telemetry.record("memory", step=step, rows=rows)
            self.telemetry.record("collectives", step=step, rows=sampler.collective_rows())
        self._samples.clear()

    def _evaluate(self) -> None:
        """Evaluate on held-out text every `training.evaluation.every` steps."""
        e = self.plan.training.evaluation
        if not e.every or self.index % e.every:
            return
        self._end_window()
        self._phase("evaluating")
        self._extend_deadlines()
        record: dict[str, Any] = {"step": self.index, **self._held_out()}
        if len(self.plan.corpus.mix or []) > 1:
            record["by_source"] = [
                {"source": one.source, "loss": self._held_out(i)["loss"]}
                for i, one in enumerate(self.text.sources)
            ]
        self.telemetry.record("evaluation", **record)
        shown = {f"held_out_{name}": x for name, x in record.items() if isinstance(x, float)}
        self.trackers.log(shown, self.index)
        self._restore_deadlines()
        self._phase("training")

    def _held_out(self, source: int | None = None) -> dict[str, float]:
        """Loss a token of the held-out text, or a pair and its rewards: of the mixture, or of one
        source.
        """
        batches, tokens = self.plan.training.evaluation.batches, 0
        preference = self.session.preference
        count = 1 if preference is None else 1 + len(preference.loss.sums)
        total = torch.zeros(count, dtype=torch.float64, device=self.session.device)
        for i in range(batches):
            tokens += self.text.evaluated_tokens(i, source)
            batch = self.feed.load_evaluation(i, source)
            self._set_reference("holdout", i, source)
            loss = self.session.evaluate(*batch)
            if loss is not None and counts_own_loss(self.mesh):
                parts = [loss[None]] if preference is None else [loss[None], preference.loss.sums]
                total += torch.cat(parts).double()
        if self.mesh.world_size > 1:
            dist.all_reduce(total)
        if preference is None:
            return {"loss": total.item() / max(1, tokens)}
        loss_of_pair, *rewards = (total / (batches * num_pairs(self.plan))).tolist()
        return {"loss": loss_of_pair, **reward_record(rewards)}

    def _save(self, asked: bool) -> None:
        """Start writing a checkpoint, every `checkpoint.every` steps, at the end, and where
        `asked`.

        A checkpoint that cannot be written does not end the training: it is reported, and the next
        one is attempted as planned. Of the last step there is no next one (`_finish_saving`).
        """
        self._report_unsaved(self.saver.check)
        every, last = self.plan.checkpoint.every, self.index == self.plan.training.steps
        due = bool(every) and self.index % every == 0
        if not (asked or due or (last and self.plan.saves_at_end)):
            return
        self._end_window()
        self._phase("checkpointing")
        self._extend_deadlines()
        self._report_unsaved(self.saver.wait)
        self._unsaved = self._report_unsaved(lambda: self.saver.save(self.index))
        self._restore_deadlines()
        self._phase("training")

    @property
    def _compiles_in_first_step(self) -> bool:
        return self.session.device.type == "cuda"

    def _extend_deadlines(self) -> None:
        """Before what may take longer on one rank than on others: building, a checkpoint, an
        evaluation, a GPU's first step.
        """
        extend_deadlines(self.mesh, self.plan.telemetry.timeout_seconds)

    def _restore_deadlines(self) -> None:
        seconds = self.plan.telemetry.timeout_seconds
        restore_deadlines(self.mesh, seconds, self.session.device)

    def _saved(self, step: int, path: Path, seconds: float) -> None:
        """Record a committed checkpoint; called from the writer's thread."""
        self.telemetry.record("checkpoint", step=step, path=str(path), seconds=seconds)

    def _finish_saving(self) -> None:
        """Wait for the pending checkpoint before the run ends.

        Raises:
            PlanError: That of the last step cannot be written: it is what the run was for.
        """
        self._phase("checkpointing")
        unsaved = self._report_unsaved(self.saver.wait) or self._unsaved
        self.saver.close()
        if unsaved and self.index == self.plan.training.steps and self.plan.saves_at_end:
            raise refuse("checkpoint", str(unsaved).removeprefix("checkpoint: "))

    def _report_unsaved(self, work: Callable[[], object]) -> ValueError | None:
        """Run `work`, and report a checkpoint that it finds to have failed; returns its error."""
        try:
            work()
        except ValueError as error:
            print(error, file=sys.stderr)
            self.telemetry.record("unsaved", step=self.index, message=str(error))
            return error
        return None

    def _phase(self, phase: str, detail: str | None = None) -> None:
        self.action_tracker.current = phase
        if phase == "training":
            self._own_since = self._clock.now()  # no step's own: building, evaluating, saving
        self.telemetry.record("phase", phase=phase, step=self.index, detail=detail)
