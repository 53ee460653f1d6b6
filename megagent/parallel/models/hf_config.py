"""Reading a config.json with nothing left over: every key is understood, known to be harmless, or a problem."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megagent.errors import ConfigError
from megagent.parallel.models.architecture import Experts, Rope

BELONGING = "take the config.json that belongs to the weights"

# Keys that change neither the weights' shapes nor what the model computes from tokens in training.
# fmt: off
HARMLESS = frozenset((
    # Who wrote the file, and how it should be loaded.
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "architectures",
    "attn_implementation", "dtype", "model_type", "name_or_path", "tokenizer_class", "torch_dtype",
    "transformers_version", "unsloth_fixed", "unsloth_version",
    # Token ids, generation and outputs.
    "add_cross_attention", "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "id2label", "is_decoder", "is_encoder_decoder", "label2id",
    "length_penalty", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_labels", "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores",
    "pad_token_id", "prefix", "problem_type", "pruned_heads", "remove_invalid_values", "repetition_penalty",
    "return_dict", "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params",
    "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_config", "top_k", "top_p", "torchscript",
    "typical_p", "use_bfloat16", "use_cache",
    # Llama: a way to compute the same products in slices.
    "pretraining_tp",
))
# fmt: on


class ConfigReader:
    """One pass over a config: typed values come out, every fault is collected, `finish` raises them together."""

    def __init__(self, config: Mapping[str, Any], family: str, defaults: Mapping[str, Any]) -> None:
        self.config = {**defaults, **config}
        self._default_theta = float(defaults.get("rope_theta", 10000.0))
        self.family = family
        self.problems: list[str] = []
        self._read: set[str] = set()

    def problem(self, text: str) -> None:
        self.problems.append(text)

    def value(self, *keys: str) -> Any:
        """The value of the first of these keys that is not null, None if all are."""
        self._read.update(keys)
        return next((self.config[key] for key in keys if self.config.get(key) is not None), None)

    def integer(self, *keys: str, default: int | None = None, at_least: int = 1) -> int:
        """A whole number under the first of these keys; without a default it has to be there."""
        value = self.value(*keys)
        if value is None:
            return self._absent(keys[0], default, at_least)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            self.problem(f"{keys[0]}={value!r}: a whole number of at least {at_least} is needed; {BELONGING}")
            return at_least
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key)
        if value is None:
            return self._absent(key, default, 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            self.problem(f"{key}={value!r}: a number of at least 0 is needed; {BELONGING}")
            return 1.0
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.value(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problem(f"{key}={value!r}: true or false is needed; {BELONGING}")
        return bool(value)

    def only(self, key: str, accepted: Any, why: str) -> None:
        """A feature that is not supported: the key has to be absent, null or `accepted`."""
        value = self.value(key)
        if value is not None and value != accepted:
            self.problem(f"{key}={value!r}: {why}")

    def rope(self, scaled: bool = False) -> Rope:
        """Rotary embedding in either spelling: rope_theta and rope_scaling, or rope_parameters (transformers 5).

        scaled: whether the family's models may have the scaling of Llama 3.
        """
        values: dict[str, Any] = {"rope_theta": self.value("rope_theta")}
        for key in ("rope_scaling", "rope_parameters"):
            part = self.value(key)
            if part is not None and not isinstance(part, Mapping):
                self.problem(f"{key}={part!r}: an object is needed; {BELONGING}")
            elif part:
                values |= {name: value for name, value in part.items() if value is not None}
        theta = values.pop("rope_theta")
        if theta is None:
            theta = self._default_theta  # null counts as absent
        elif isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < math.inf:
            self.problem(f"rope_theta={theta!r}: a number above 0 is needed; {BELONGING}")
            theta = 10000.0
        kinds = [values.pop(key) for key in ("rope_type", "type") if key in values]
        kind = kinds[0] if kinds else "default"
        if values.pop("partial_rotary_factor", 1) != 1 or self.value("partial_rotary_factor") not in (None, 1):
            self.problem(
                "partial_rotary_factor: only 1, where all of a head rotates, is supported; choose another model"
            )
        if kind == "default":
            values.pop("factor", None)
            factor = None
        elif kind == "llama3" and scaled:
            factor = self._llama3(values)
        else:
            self.problem(
                f"rope type {kind} is not supported; remove rope_scaling for the model's original context"
                if not scaled
                else f"rope type {kind} is not supported, only default and llama3; choose another model"
            )
            return Rope(float(theta))
        if values:
            self.problem(f"rope parameters {', '.join(sorted(values))} are not known; {BELONGING}")
        return Rope(float(theta), factor)

    def _llama3(self, values: dict[str, Any]) -> float:
        # Megatron takes the factor only; the other three are fixed in its RotaryEmbedding.
        for name, fixed in Rope.LLAMA3.items():
            if (value := values.pop(name, None)) != fixed:
                self.problem(f"rope_scaling.{name}={value!r}: Megatron computes with {fixed}; choose another model")
        factor = values.pop("factor", None)
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor < math.inf:
            self.problem(f"rope_scaling.factor={factor!r}: a number of at least 1 is needed; {BELONGING}")
            return 1.0
        return float(factor)

    def sliding_window(self, positions: int, layers: int) -> None:
        """Attention has to see everything: a window is accepted only where it cannot take effect."""
        window = self.value("sliding_window")
        enabled = self.flag("use_sliding_window", default="use_sliding_window" not in self.config)
        kinds = self.value("layer_types")
        # Qwen's windows start at layer max_window_layers; a family without that key has them in all layers.
        below = self.integer("max_window_layers", default=0, at_least=0)
        if kinds is None:
            windowed = enabled and window is not None and below < layers
        else:
            if not isinstance(kinds, list | tuple) or len(kinds) != layers:
                self.problem(f"layer_types={_short(kinds)}: a list of {layers}, one a layer, is needed; {BELONGING}")
                return
            windowed = any(kind != "full_attention" for kind in kinds)
        if windowed and (not isinstance(window, int) or window < positions):
            self.problem(
                f"sliding_window={window} is smaller than max_position_embeddings={positions}, and sliding-window "
                "attention is not supported; lower max_position_embeddings to it, which gives the same results up to "
                "there, or choose another model"
            )

    def experts(self, ffn: int, renormalised: bool) -> Experts:
        """The mixture of experts; transformers 5 knows the number of them by two names."""
        count = self.integer("num_experts", "num_local_experts")
        per_token = self.integer("num_experts_per_tok")
        if per_token > count:
            self.problem(f"num_experts_per_tok={per_token} is more than the {count} experts; {BELONGING}")
        if per_token == 1 and renormalised:
            self.problem("num_experts_per_tok=1: one expert's renormalised weight is always 1; choose another model")
        # Without output_router_logits transformers does not compute the loss, whatever its coefficient.
        aux_loss = self.number("router_aux_loss_coef", default=0.0)
        return Experts(count, per_token, ffn, renormalised, aux_loss if self.flag("output_router_logits") else 0.0)

    def finish(self) -> None:
        """Raises ConfigError with every problem, among them each key that nobody read and that may matter."""
        if self.config.get("quantization_config") is not None:
            self._read.add("quantization_config")
            self.problem("quantization_config: quantised weights are not supported; take the bf16 checkpoint")
        if self.config.get("auto_map") is not None:
            self._read.add("auto_map")
            self.problem("auto_map: the model computes by code of its own; take the one that transformers implements")
        for key, value in self.config.items():
            if value is not None and key not in self._read and key not in HARMLESS:
                self.problem(
                    f"{key}={_short(value)}: not known of {self.family} models, so it may change what they compute; "
                    "remove it if you know that it does not"
                )
        if self.problems:
            raise ConfigError(self.problems, source=f"config.json of a {self.family} model")

    def _absent(self, key: str, default: Any, stand_in: Any) -> Any:
        if default is None:
            self.problem(f"{key} is missing; {BELONGING}")
            return stand_in
        return default


def _short(value: Any, length: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= length else text[: length - 3] + "..."
