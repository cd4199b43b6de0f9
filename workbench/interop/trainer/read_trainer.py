"""Arguments of Hugging Face's Trainer and TRL, of LLaMA-Factory and of axolotl: what they say of a
plan that fine-tunes.

One reader for one family: `dialects` spells each argument, `trainer_keys` says what a plan cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workbench.errors import PlanError, refuse
from workbench.interop.foreign_keys import flat, unknown_key
from workbench.interop.foreign_text import from_braces, mapping
from workbench.interop.trainer import command_line, sharding, training_fields, tuning
from workbench.interop.trainer import trainer_keys as known
from workbench.interop.trainer.arguments import Arguments
from workbench.interop.trainer.command_line import CommandLine
from workbench.interop.trainer.dialects import Dialect, TrainerFormat, dialect, trl_names
from workbench.interop.trainer.files_beside import section
from workbench.interop.trainer.kernels import attention_of, kernels_of, recompute_of
from workbench.interop.trainer.models_by_name import model_of, weights
from workbench.interop.trainer.precision import Precision, precision_of
from workbench.interop.translation import DEFAULT, Imported, ImportOptions, KeyNote, imported
from workbench.plan.model.model_shape import Shape
from workbench.plan.model.parameter_count import parameters
from workbench.plan.resolution import model_shape
from workbench.units import gib_text
from workbench.untrusted_text import shown

SECTIONS = ("deepspeed", "fsdp_config", "parallelism_config")
"""Arguments that hold the settings of other software, or name a file of them."""


_WHICH = (
    "no argument is TRL's alone; TRL's own defaults are others: bf16, gradient_checkpointing, and "
    "learning_rate 2e-5 of SFT, 1e-6 of DPO"
)


def read_hf_trainer(
    text: str | Mapping[str, Any], given: ImportOptions | None = None, lenient: bool = False
) -> Imported:
    """The plan of `TrainingArguments` with TRL's, as YAML, JSON, a command line or parsed. Raises
    `PlanError` naming the argument.
    """
    return _read("hf-trainer", text, given, lenient)


def read_llama_factory(
    text: str | Mapping[str, Any], given: ImportOptions | None = None, lenient: bool = False
) -> Imported:
    """The plan of a LLaMA-Factory YAML, likewise."""
    return _read("llama-factory", text, given, lenient)


def read_axolotl(
    text: str | Mapping[str, Any], given: ImportOptions | None = None, lenient: bool = False
) -> Imported:
    """The plan of an axolotl YAML, likewise."""
    return _read("axolotl", text, given, lenient)


def _read(
    format: TrainerFormat, text: str | Mapping[str, Any], given: ImportOptions | None, lenient: bool
) -> Imported:
    given, line = given or ImportOptions(), CommandLine()
    if isinstance(text, str) and command_line.is_command_line(text):
        line = command_line.read(text, dialect(format).known, given)
        data = line.data
    else:
        data = mapping(from_braces(text, "file") if isinstance(text, str) else text, "file")
    data = _loading(data)
    trainer = line.trainer or _trainer(data) if format == "hf-trainer" else ""
    names = dialect(format, trainer)
    unknown = _check_names(data, names, lenient)
    own = {key: value for key, value in data.items() if key not in unknown}
    flat({key: own[key] for key in SECTIONS if key in own})  # refuses keys that are no text
    a = Arguments({k: v for k, v in own.items() if k not in SECTIONS}, names)
    _refuse(own, names)
    a.keys.ignored += line.ignored
    if format == "hf-trainer" and not trainer:
        a.keys.assume("trainer", "Trainer", _WHICH)
    plan = _Reader(a, own, given, lenient, line).plan()
    for key, value in flat(unknown).items():
        a.keys.unknown.append(KeyNote(key, value, "the format does not know this key"))
        a.keys.untranslated.append(a.keys.unknown[-1])
    a.keys.finish(names.known, known.WHYS, names.known, lenient)
    if a.keys.problems:
        raise PlanError(a.keys.problems)
    return imported(format, plan, a.keys, given)


def _loading(data: dict[str, Any]) -> dict[str, Any]:
    """The arguments with those of `from_pretrained` that change what is kept and computed."""
    found = data.get("model_init_kwargs")
    if not isinstance(found, Mapping):
        return data
    read = {
        key: found[key] for key in ("dtype", "torch_dtype", "attn_implementation") if key in found
    }
    left = {key: value for key, value in found.items() if key not in read}
    return {
        **data,
        **{k: v for k, v in read.items() if k not in data},
        "model_init_kwargs": left or None,
    }


def _trainer(data: Mapping[str, Any]) -> str:
    """The trainer of TRL that the arguments are of; empty where they are of none of TRL's."""
    names = {key for key, value in data.items() if value is not None}
    if names & (trl_names("DPO") - trl_names("SFT")):
        return "DPO"
    return "SFT" if names & trl_names() else ""


def _check_names(data: Mapping[str, Any], names: Dialect, lenient: bool) -> dict[str, Any]:
    """Arguments that the format does not have, where it is read leniently. Raises `PlanError`."""
    found: dict[str, Any] = {}
    problems = []
    for key, value in data.items():
        if not isinstance(key, str):
            raise refuse(str(key), f"the key {shown(key)} is not text; every key is")
        if key in names.known:
            continue
        if key in names.foreign and value is not None:
            raise refuse(
                key,
                f"is an argument of {names.foreign[key]}, which has other models in memory and "
                "other steps; a plan trains on tokens (SFT) or on pairs (DPO)",
            )
        found[key] = value
        problems.append(unknown_key(key, key, sorted(names.known)))
    if problems and not lenient:
        raise PlanError(problems)
    return found


def _refuse(data: Mapping[str, Any], names: Dialect) -> None:
    """Refuse what would make another plan of it."""
    for key, why in known.REFUSED.items():
        if key in names.known and known.is_on(value := data.get(key)):
            raise refuse(key, f"is {shown(value)}: {why}; legal: without it")
    plugins = data.get("plugins")
    for name in plugins if isinstance(plugins, list) else []:
        if str(name).rpartition(".")[2] not in known.PLUGINS:
            raise refuse(
                "plugins",
                f"names {shown(name)}, which may change what is trained; legal: "
                f"{', '.join(known.PLUGINS)}",
            )


class _Reader:
    """One file's plan, section by section."""

    def __init__(
        self,
        a: Arguments,
        data: Mapping[str, Any],
        given: ImportOptions,
        lenient: bool,
        line: CommandLine,
    ) -> None:
        self.a, self.data, self.given, self.lenient, self.line = a, data, given, lenient, line

    def plan(self) -> dict[str, Any]:
        """The plan as plain data, whatever it says checked by `imported`."""
        a, given = self.a, self.given
        name = self.data.get(a.key("model"))
        model = model_of(a, given)
        given = self.given = replace(given, model=given.model or _named(model))
        world = given.world(self.line.gpus or self._workers(), "its launcher says it")
        cluster = given.cluster(world)
        pairs = tuning.preference(a, given, bool(self.line.trainer))
        method = tuning.method(a)
        precision = precision_of(a, method, given.gpu)
        length = training_fields.steps(a, given)
        tune = self._finetune(method, pairs, length)
        axes = self._axes(world)
        ranks = world // (axes["tensor"] * axes["context"])
        tune |= training_fields.batch(a, ranks, pairs is not None)
        strategy = self._strategy(tune, axes, precision, world, ranks, length)
        if pairs is not None:
            strategy = self._of_pairs(strategy, method, tune)
        base = weights(name if isinstance(name, str) else None, given)
        if base is None:
            a.keys.assume("finetune.base", None, "weights are the Hub's; an estimate needs none")
        return {
            "model": model,
            "cluster": cluster,
            "strategy": strategy,
            "finetune": {**tune, **({} if base is None else {"base": base})},
            **({"corpus": {"format": "preferences"}} if pairs is not None else {}),
            "checkpoint": training_fields.checkpoint(a, length),
            "telemetry": {"trackers": training_fields.trackers(a, self.data)},
        }

    def _workers(self) -> int | None:
        """Workers that Ray starts, of a GPU each; axolotl reads them with use_ray alone."""
        keys = self.a.keys
        on = self.a.dialect.format == "llama-factory" or keys.flag("use_ray")
        return keys.integer("ray_num_workers") if on else None

    def _finetune(
        self, method: str, pairs: dict[str, Any] | None, length: int | None
    ) -> dict[str, Any]:
        a = self.a
        found: dict[str, Any] = {"method": method}
        if method == "lora":
            found["lora"] = tuning.lora(a, pairs is not None)
        if (four := tuning.quantize(a, method == "lora")) is not None:
            found["quantize"] = four
        if pairs is not None:
            found["preference"] = pairs
        if length is not None:
            found["steps"] = length
        found["optimizer"] = training_fields.optimizer(a, length)
        found |= training_fields.evaluation(a, length)
        if (seed := a.keys.integer("seed", 0)) is not None:
            found["seed"] = seed
        if a.keys.flag("full_determinism"):
            found["deterministic"] = True
        return found | self._length()

    def _length(self) -> dict[str, int]:
        a, key = self.a, self.a.key("length")
        found = a.keys.integer(key)
        if found is None and a.default("length") is not None:
            found = int(a.assume("finetune.sequence_length", a.default("length"), "length"))
        if found is None:
            a.keys.assume("finetune.sequence_length", DEFAULT, "the script's; the plan's default")
            return {}
        packed = a.key("packing")
        if (said := a.keys.flag(packed)) is None and a.keys.value("stage") == "pt":
            a.keys.assume(packed, True, "LLaMA-Factory packs rows in pre-training")
        elif not said:
            a.keys.assume(
                packed,
                False,
                "rows are padded to the longest of their batch; an estimate has full sequences, "
                "the most memory and time",
            )
        return {"sequence_length": found}

    def _axes(self, world: int) -> dict[str, int]:
        """Ranks of tensor and context axes, which axolotl says itself."""
        keys = self.a.keys
        if self.a.dialect.format != "axolotl":
            return {"tensor": 1, "context": 1}
        found = {
            "tensor": keys.count("tensor_parallel_size") or 1,
            "context": keys.renamed_integer("context_parallel_size", "sequence_parallel_degree")
            or 1,
        }
        others = found["tensor"] * found["context"]
        if world % others:
            raise refuse(
                "gpus", f"is {world}, which tensor x context ranks = {others} do not divide"
            )
        return found

    def _strategy(
        self,
        tune: dict[str, Any],
        axes: Mapping[str, int],
        precision: Precision,
        world: int,
        ranks: int,
        length: int | None,
    ) -> dict[str, Any]:
        """The plan's `strategy`; what DeepSpeed says of the optimizer is put into `tune`."""
        a, given = self.a, replace(self.given, gpus=world, sets={})
        how = self._sharded(tune, axes, precision, given, ranks, length)
        if how is None:
            a.keys.assume("strategy.data.zero", 0, sharding.NOTHING_NAMED)
            how = {"data": {"zero": 0}, **precision.unsharded(tune)}
            if (bucket := a.keys.number("ddp_bucket_cap_mb", 1, 2**20)) is not None:
                how["data"]["bucket_mib"] = bucket
            if max(axes.values()) > 1:
                how |= {"stack": "fsdp", "tensor": {"size": axes["tensor"]}}
                how["context"] = {"size": axes["context"], "algorithm": "ring"}
        elif precision.computed in ("fp8", "tf32"):  # of which these settings have no word
            how["precision"] = precision.computed
        how["kernels"], loss = kernels_of(a, how.get("kernels", "eager"))
        recompute = recompute_of(a, how.get("recompute") == "full")
        found = {**how, "recompute": recompute, "attention": attention_of(a, given.gpu)}
        return found | ({"loss": loss} if loss else {})

    def _sharded(
        self,
        tune: dict[str, Any],
        axes: Mapping[str, int],
        precision: Precision,
        given: ImportOptions,
        ranks: int,
        length: int | None,
    ) -> dict[str, Any] | None:
        """The strategy that DeepSpeed's or FSDP's settings say; None where the file has none."""
        a, keys = self.a, self.a.keys
        if (settings := self.data.get("deepspeed")) is not None and self._may_read("deepspeed"):
            steps = length or training_fields.STEPS
            filled = sharding.values(
                a, given, tune, ranks, tune["optimizer"], steps, precision.computed
            )
            found = sharding.deepspeed(a, settings, given, filled, self.lenient)
            if not isinstance(settings, Mapping):
                keys.translated.append("deepspeed")
            tune["optimizer"] |= found["optimizer"]
            return dict(found["strategy"])
        if self.line.launch is not None:
            return sharding.launched(a, self.line, given, precision.computed, self.lenient)
        sizes = self._fsdp_sizes(axes)
        value, config = keys.take("fsdp"), self.data.get("fsdp_config")
        if not (value or sizes or (config and a.dialect.format == "axolotl")):
            if config:
                keys.untranslated.append(KeyNote("fsdp_config", config, "read only with fsdp"))
            return None
        if not self._may_read("fsdp_config" if isinstance(config, str) else ""):
            return None
        if isinstance(config, Mapping) and (version := keys.take("fsdp_version")) is not None:
            config = {"version": version, **config}
        if (layer := keys.take("fsdp_transformer_layer_cls_to_wrap")) is not None:
            config = {"transformer_layer_cls_to_wrap": layer, **(config or {})}
        found = sharding.fsdp(a, value, config, sizes, given, precision.computed, self.lenient)
        if isinstance(config, str):
            keys.translated.append("fsdp_config")
        return found

    def _may_read(self, key: str) -> bool:
        """False where a file that is not here is done without, because the plan's stage is set."""
        value = self.data.get(key)
        if not (isinstance(value, str) and "strategy.data.zero" in self.given.sets):
            return True
        try:
            section(value, key, self.given, {})
        except PlanError:
            self.a.keys.untranslated.append(
                KeyNote(key, value, "is not here; strategy.data.zero is set beside the file")
            )
            return False
        return True

    def _fsdp_sizes(self, axes: Mapping[str, int]) -> dict[str, Any]:
        """accelerate's sizes of axes, which switch FSDP on by themselves in axolotl."""
        keys = self.a.keys
        if self.a.dialect.format != "axolotl":
            said = self.data.get("parallelism_config")
            keys.translated += ["parallelism_config"] * isinstance(said, Mapping)
            return dict(said) if isinstance(said, Mapping) else {}
        shard, replicate = keys.count("dp_shard_size"), keys.count("dp_replicate_size")
        if shard is None and not self.data.get("fsdp_config") and not self.data.get("fsdp"):
            return {}
        sizes = {"dp_shard_size": shard, "dp_replicate_size": replicate}
        sizes |= {"tp_size": axes["tensor"], "cp_size": axes["context"]}
        return {key: size for key, size in sizes.items() if size is not None and size != 1}

    def _of_pairs(
        self, strategy: dict[str, Any], method: str, tune: dict[str, Any]
    ) -> dict[str, Any]:
        """The strategy of a plan that trains on pairs, which this engine alone does."""
        keys = self.a.keys
        stack = strategy.get("stack")
        keys.assumed[:] = [n for n in keys.assumed if n.field != "strategy.attention"]
        keys.assume(
            "strategy.stack",
            "workbench",
            f"pairs are trained by this engine alone, so the estimate is this engine's, not "
            f"{stack}'s",
        )
        kernels = {"liger": "fused"}.get(strategy["kernels"], strategy["kernels"])
        if method == "full":
            shape = model_shape(self.given.model) if self.given.model is not None else None
            size = f" = {gib_text(2 * parameters(shape).total)} before sharding" if shape else ""
            keys.assume(
                "finetune.preference",
                tune["preference"],
                "the reference is computed before the first step (precompute_ref_log_probs); TRL "
                f"else keeps it too: + 2 bytes x parameters{size}, and a forward more a step",
            )
        left = {k: v for k, v in strategy.items() if k not in ("stack", "attention", "loss")}
        return {**left, "kernels": kernels}


def _named(model: str | dict[str, Any]) -> Any:
    return model if isinstance(model, str) else Shape.model_validate(model)
