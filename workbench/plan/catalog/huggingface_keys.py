"""The keys of a Hugging Face `config.json`: each read with its type checked, and what is made of
those that are not.

A key is used (a field of the shape says it), computes something that a shape cannot say, is ignored
for a reason, or is unknown. Names and defaults are those of transformers' `configuration_*.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from workbench.errors import PlanError, refuse
from workbench.fields.bounds import LAYERS
from workbench.untrusted_text import shown

MOST = 2**24
"""Largest count that is believed: no published width, vocabulary or context is near it."""
MOST_LAYERS = LAYERS.most
REQUIRED: Final = object()

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "add_cross_attention": (None, False),
    "scale_attn_weights": (None, True),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "layer_norm_elementwise_affine": (None, True),
    "_remove_final_layer_norm": (None, False),
    "layerdrop": (None, 0, 0.0),
    "apply_residual_connection_post_layernorm": (None, False),
    "router_jitter_noise": (None, 0, 0.0),
    "scoring_func": (None, "softmax"),
    "topk_method": (None, "greedy"),
    "n_group": (None, 1),
    "routed_scaling_factor": (None, 1, 1.0),
    "num_nextn_predict_layers": (None, 0),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "parallel_attn": (None, False),
    "qk_layernorm": (None, False),
    "use_qk_norm": (None, False),
    "is_encoder_decoder": (None, False),
    "use_bidirectional_attention": (None, False),
    "logit_scale": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1, 1.0),
    "attention_sink_size": (None, 0),
    "kv_lora_scale": (None,),
    "pruned_heads": (None, {}),
}
"""Key -> values with which the model computes what its shape says; any other is reported as not
modelled.
"""

_ELSEWHERE = {
    "strategy.precision decides": "torch_dtype dtype use_bfloat16",
    "training.dropout decides": "attention_dropout attn_pdrop embd_pdrop resid_pdrop "
    "hidden_dropout dropout "
    "activation_dropout classifier_dropout summary_first_dropout",
    "weights are initialised by the plan's seed, or loaded": "initializer_range "
    "initializer_factor init_std "
    "rescale_prenorm_residual",
    "model.moe.auxiliary_loss decides": "router_aux_loss_coef aux_loss_alpha seq_aux "
    "output_router_logits",
    "the corpus and its tokenizer decide": "bos_token_id eos_token_id pad_token_id sep_token_id "
    "unk_token_id "
    "decoder_start_token_id tokenizer_class prefix word_embed_proj_dim_pad",
    "it changes how the same products are split, not what is computed": "pretraining_tp "
    "slow_but_exact "
    "reorder_and_upcast_attn attention_softmax_in_fp32 masked_softmax_fusion ep_size "
    "bias_dropout_fusion",
    "the model code of another library; none of it is run": "architectures auto_map "
    "transformers_version _name_or_path "
    "torchscript _attn_implementation attn_implementation _flash_attn_2_enabled "
    "gradient_checkpointing use_return_dict "
    "return_dict transformers_js_config unsloth_version unsloth_fixed base_model_tp_plan "
    "base_model_pp_plan",
    "transformers' class of the family reads none": "sliding_window use_sliding_window "
    "max_window_layers sliding_window_pattern hidden_act n_ctx",
    "generation, or a head for another task": "use_cache do_sample max_length min_length "
    "temperature top_k top_p "
    "typical_p repetition_penalty length_penalty no_repeat_ngram_size num_beams num_beam_groups "
    "num_return_sequences "
    "diversity_penalty early_stopping bad_words_ids suppress_tokens begin_suppress_tokens "
    "forced_bos_token_id "
    "forced_eos_token_id exponential_decay_length_penalty encoder_no_repeat_ngram_size "
    "remove_invalid_values "
    "return_dict_in_generate output_scores output_attentions output_hidden_states "
    "task_specific_params problem_type "
    "id2label label2id num_labels finetuning_task summary_type summary_use_proj summary_activation "
    "summary_proj_to_labels skip_bias_add skip_bias_add_qkv is_decoder "
    "cross_attention_hidden_size chunk_size_feed_forward tie_encoder_decoder tf_legacy_loss",
}
IGNORED = {key: why for why, keys in _ELSEWHERE.items() for key in keys.split()}
"""Key -> why a shape need not say it."""
IDLE = "beside the other keys it changes nothing"


@dataclass(frozen=True)
class Account:
    """What was made of each key of a config.json."""

    used: list[str]
    """Keys that a field of the shape says."""
    not_modelled: dict[str, str]
    """Key -> what the model computes with it and no field of the shape says."""
    ignored: dict[str, str]
    """Key -> why it changes nothing here, or what decides in its place."""
    unknown: dict[str, Any]
    """Keys that are not known here, with their values."""

    def lines(self) -> list[str]:
        """The account as a person reads it, a line a kind of key."""
        why: dict[str, list[str]] = {}
        for key, reason in self.ignored.items():
            why.setdefault(reason, []).append(key)
        ignored = [f"{', '.join(keys)}: {reason}" for reason, keys in why.items()]
        return [
            f"used: {', '.join(self.used)}",
            *(f"not modelled: {what}" for what in self.not_modelled.values()),
            *(f"ignored: {line}" for line in ignored),
            *(f"unknown: {key} = {shown(value)}" for key, value in self.unknown.items()),
        ]


@dataclass
class Reading:
    """A configuration while it is read: every value checked, every key that was asked for
    remembered.
    """

    config: Mapping[str, Any]
    where: str
    used: dict[str, None] = field(default_factory=dict)
    not_modelled: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    kind: str = "model_type"
    """Key of the family."""
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: NEUTRAL)
    ignored: Mapping[str, str] = field(default_factory=lambda: IGNORED)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default` where it is absent or null. Raises `PlanError` for a
        missing REQUIRED.
        """
        if key in self.config:
            self.used[key] = None
        value = self.config.get(key)
        if value is None and default is REQUIRED:
            raise refuse("model", f"'{self.where}' ({self.config.get('model_type')}) has no {key}")
        return default if value is None else value

    def whole(self, key: str, default: Any = REQUIRED, least: int = 1, most: int = MOST) -> Any:
        """The integer at `key`."""
        value = self.get(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(key, value, f"an integer from {least} to {most}")
        return value

    def number(
        self, key: str, default: float | None, source: Mapping[str, Any] | None = None
    ) -> float | None:
        """The number above 0 at `key`, of this configuration or of a mapping in it."""
        value = self.get(key) if source is None else source.get(key)
        if value is None:
            return default
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value <= 1e30 or not math.isfinite(value):
            raise self.wrong(key, value, "a number above 0")
        return float(value)

    def unless_null(self, key: str, usual: Any) -> Any:
        """Meaning of a key that is absent or null, of a family where null turns it off."""
        return None if key in self.config else usual

    def flag(self, key: str, default: bool) -> bool:
        """True or false at `key`."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def section(self, key: str) -> dict[str, Any]:
        """The mapping at `key`; empty where absent."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, value, "a mapping of keys to values")
        return value

    def lacks(self, key: str, what: str) -> None:
        """Tell what the model computes with `key` and no field of the shape says."""
        self.not_modelled[key] = what

    def leave_out(self, key: str, why: str) -> None:
        """Tell that a model is complete without what `key` says, which it lacks here."""
        self.left_out[key] = why

    def wrong(self, key: str, value: Any, legal: str) -> PlanError:
        """A value that means nothing, to be raised."""
        return refuse("model", f"{key} of '{self.where}' is {shown(value)}; must be {legal}")

    def account(self) -> Account:
        """What was made of every key; values that are not neutral become what is not modelled."""
        rest = {
            k: v
            for k, v in self.config.items()
            if k not in self.used and k not in self.not_modelled
        }
        rest.pop(self.kind, None)
        neutral_keys = {k: v for k, v in rest.items() if k in self.neutral}
        for key, value in neutral_keys.items():
            plain = self.neutral[key]
            if not any(type(value) is type(each) and value == each for each in plain):
                self.lacks(key, f"{key} {_json(value)}")
        neutral = {
            key: "as the shape has it" for key in neutral_keys if key not in self.not_modelled
        }
        ignored = {k: self.ignored[k] for k in rest if k in self.ignored and k not in neutral_keys}
        unknown = {
            key: value
            for key, value in rest.items()
            if key not in neutral_keys and key not in ignored
        }
        elsewhere = self.not_modelled.keys() | self.left_out.keys()
        used = [self.kind, *(key for key in self.used if key not in elsewhere)]
        return Account(
            used, dict(self.not_modelled), {**ignored, **neutral, **self.left_out}, unknown
        )

    def tried_account(self, read: Callable[[Reading], Any]) -> Account:
        """The account in which a key is used only where another value of it makes another shape,
        or is refused.

        Args:
            read: Fields of the shape that a configuration describes.
        """
        made = self.account()
        now = self._outcome(dict(self.config), read)
        idle = [
            key
            for key in made.used[1:]
            if (others := list(_others(self.config[key])))
            and all(self._outcome({**self.config, key: it}, read) == now for it in others)
        ]
        used = [key for key in made.used if key not in idle]
        return replace(made, used=used, ignored={**made.ignored, **dict.fromkeys(idle, IDLE)})

    def _outcome(self, config: dict[str, Any], read: Callable[[Reading], Any]) -> Any:
        reading = replace(self, config=config, used={}, not_modelled={}, left_out={})
        try:
            return read(reading), reading.not_modelled, reading.left_out
        except PlanError:
            return None


def _others(value: Any) -> Iterator[Any]:
    """Other values of the same kind; none of a value that says nothing."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
        yield from (value >> bits for bits in range(1, value.bit_length()))
    elif isinstance(value, float):
        yield value * 2
    elif isinstance(value, str):
        yield f"{value}?"
    elif isinstance(value, list):
        yield [*value, "?"]
    elif isinstance(value, dict):
        for key, own in value.items():
            yield from ({**value, key: other} for other in _others(own))


def _json(value: Any) -> str:
    """A value in a message; a mapping or a list as the file spells it, cut where it is long."""
    if not isinstance(value, dict | list):
        return shown(value)
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
