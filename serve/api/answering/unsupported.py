"""Fields of other servers and older APIs that would change the answer, and that are not had here.

To ignore one would give another answer than was asked for, so each is refused by name, unless its
value means that nothing is asked. One table for every route that generates. Fields that only
describe a request (metadata, user, store, …) are none of these, and pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve.api.errors import Unsupported

_ASKS_NOTHING: tuple[Any, ...] = (False, "", [], {})


@dataclass(frozen=True, slots=True)
class _Wish:
    """Why a field is refused; with which values it asks nothing (null never does); and the field
    that, itself off, makes it mean nothing."""

    reason: str
    neutral: tuple[Any, ...] = _ASKS_NOTHING
    switch: str | None = None


def _wish(reason: str, *neutral: Any, switch: str | None = None) -> _Wish:
    return _Wish(reason, neutral or _ASKS_NOTHING, switch)


_STRUCTURED = (
    "a form is asked for with response_format (chat and completions), text.format (responses) or "
    "output_config.format (messages)"
)
_BEAMS = "beam search is not supported; use sampling with n"
_DRY = "the DRY penalty is not supported"
_XTC = "XTC sampling is not supported"
_MIROSTAT = "mirostat is not supported"
_TYPICAL = "typical sampling is not supported"
_TAIL_FREE = "tail-free sampling is not supported"
_SIGMA = "top-n-sigma sampling is not supported"
_DYNAMIC = "a dynamic temperature is not supported"
_SMOOTHING = "smoothed sampling is not supported"
_ORDER = "the order of the samplers is fixed"
_ADAPTERS = "there are no adapters here"
_PROCESSORS = "logits processors of clients are not run here"
_REPEATS = "it is called repetition_penalty here"
_WINDOW = "the repetition penalty counts all tokens; a window is not supported"
_LONGEST = "it is called max_tokens here"
_SHORTEST = "it is called min_tokens here"

_WISHES: Mapping[str, _Wish] = {
    # what OpenAI and vLLM have or had
    "suffix": _wish("completing the middle of a text is not supported"),
    "best_of": _wish("it was withdrawn; ask for n choices and pick the best by logprobs", 1),
    "use_beam_search": _wish(_BEAMS),
    "length_penalty": _wish("it belongs to beam search, which is not supported", 1),
    "early_stopping": _wish("it belongs to beam search, which is not supported"),
    "num_beams": _wish(_BEAMS, 0, 1),
    "beam_width": _wish(_BEAMS, 0, 1),
    "prompt_embeds": _wish("prompts are text or token ids"),
    "functions": _wish("it was replaced by tools"),
    "function_call": _wish("it was replaced by tool_choice"),
    "audio": _wish("this model writes text only"),
    "modalities": _wish("this model writes text only", ["text"], []),
    "web_search_options": _wish("this server searches nothing"),
    "structured_outputs": _wish(_STRUCTURED),
    "guided_json": _wish(_STRUCTURED),
    "guided_regex": _wish(_STRUCTURED),
    "guided_choice": _wish(_STRUCTURED),
    "guided_grammar": _wish(_STRUCTURED),
    "thinking_token_budget": _wish("a budget for thinking is not supported", -1),
    "logprob_token_ids": _wish("logprobs of chosen ids are not supported; use logprobs"),
    "kv_transfer_params": _wish("KV transfer is not supported"),
    "vllm_xargs": _wish("there are no plugins here"),
    "logits_processors": _wish(_PROCESSORS),
    "watermarking": _wish("watermarks are not supported"),
    # samplers
    "dry_multiplier": _wish(_DRY, 0),
    "dry_base": _wish(_DRY, 0, 1.75, switch="dry_multiplier"),
    "dry_allowed_length": _wish(_DRY, 0, 2, switch="dry_multiplier"),
    "dry_penalty_last_n": _wish(_DRY, -1, 0, switch="dry_multiplier"),
    "dry_range": _wish(_DRY, 0, switch="dry_multiplier"),
    "dry_sequence_breakers": _wish(_DRY, switch="dry_multiplier"),
    "dry_sequence_breaker_ids": _wish(_DRY, switch="dry_multiplier"),
    "xtc_probability": _wish(_XTC, 0),
    "xtc_threshold": _wish(_XTC, 0.1, switch="xtc_probability"),
    "mirostat": _wish(_MIROSTAT, 0, False),
    "mirostat_mode": _wish(_MIROSTAT, 0),
    "mirostat_tau": _wish(_MIROSTAT, 5.0, switch="mirostat"),
    "mirostat_eta": _wish(_MIROSTAT, 0.1, switch="mirostat"),
    "typical_p": _wish(_TYPICAL, 1),
    "typical": _wish(_TYPICAL, 1),
    "tfs_z": _wish(_TAIL_FREE, 1),
    "tfs": _wish(_TAIL_FREE, 1),
    "top_n_sigma": _wish(_SIGMA, -1, 0),
    "nsigma": _wish(_SIGMA, -1, 0),
    "top_nsigma": _wish(_SIGMA, -1, 0),
    "top_a": _wish("top-a sampling is not supported", 0),
    "epsilon_cutoff": _wish("epsilon sampling is not supported", 0),
    "eta_cutoff": _wish("eta sampling is not supported", 0),
    "adaptive_target": _wish("adaptive sampling is not supported", -1),
    "adaptive_decay": _wish("adaptive sampling is not supported", switch="adaptive_target"),
    "dynamic_temperature": _wish(_DYNAMIC),
    "dynatemp_range": _wish(_DYNAMIC, 0),
    "dynatemp_exponent": _wish(_DYNAMIC, 1, switch="dynatemp_range"),
    "dynatemp_min": _wish(_DYNAMIC, 0, switch="dynamic_temperature"),
    "dynatemp_max": _wish(_DYNAMIC, 0, switch="dynamic_temperature"),
    "dynatemp_low": _wish(_DYNAMIC, 1, switch="dynamic_temperature"),
    "dynatemp_high": _wish(_DYNAMIC, 1, switch="dynamic_temperature"),
    "smoothing_factor": _wish(_SMOOTHING, 0),
    "smoothing_curve": _wish(_SMOOTHING, 1, switch="smoothing_factor"),
    "skew": _wish(_SMOOTHING, 0),
    "penalty_alpha": _wish("contrastive search is not supported", 0),
    "guidance_scale": _wish("guidance by a second prompt is not supported", 1),
    "cfg_scale": _wish("guidance by a second prompt is not supported", 1),
    "negative_prompt": _wish("guidance by a second prompt is not supported", switch="cfg_scale"),
    "min_keep": _wish("candidates are not kept beside top_k, top_p and min_p", 0, 1),
    "temperature_last": _wish(_ORDER),
    "samplers": _wish(_ORDER),
    "sampler_order": _wish(_ORDER),
    "sampler_priority": _wish(_ORDER),
    "watermark": _wish("watermarks are not supported"),
    "do_sample": _wish("ask for the most likely tokens with temperature 0", True),
    "custom_logit_processor": _wish(_PROCESSORS),
    "logits_processor": _wish(_PROCESSORS),
    # penalties and bans
    "repeat_penalty": _wish(_REPEATS, 1),
    "rep_pen": _wish(_REPEATS, 1),
    "repeat_last_n": _wish(_WINDOW, -1, 0, 64, switch="repeat_penalty"),
    "repetition_penalty_range": _wish(_WINDOW, 0),
    "rep_pen_range": _wish(_WINDOW, 0, switch="rep_pen"),
    "encoder_repetition_penalty": _wish("only repetition_penalty is supported", 1),
    "no_repeat_ngram_size": _wish("bans of repeated n-grams are not supported", 0),
    "penalize_nl": _wish("penalties count every token"),
    "bad_words_ids": _wish("it is called bad_words here, and takes texts"),
    "suppress_tokens": _wish("ban tokens with logit_bias -100"),
    "custom_token_bans": _wish("ban tokens with logit_bias -100"),
    "sequence_bias": _wish("only single tokens can be biased, with logit_bias"),
    # lengths, ends and seeds under other names
    "n_predict": _wish(_LONGEST, -1),
    "num_predict": _wish(_LONGEST, -1),
    "max_new_tokens": _wish(_LONGEST),
    "max_length": _wish(_LONGEST),
    "min_new_tokens": _wish(_SHORTEST, 0),
    "min_length": _wish(_SHORTEST, 0),
    "num_return_sequences": _wish("it is called n here", 1),
    "random_seed": _wish("it is called seed here"),
    "sampling_seed": _wish("it is called seed here"),
    "stop_regex": _wish("an answer ends at texts (stop) and tokens (stop_token_ids) only"),
    "no_stop_trim": _wish("it is called include_stop_str_in_output here"),
    "n_indent": _wish("ends by indentation are not supported", 0),
    "t_max_predict_ms": _wish("limits by time are not supported; use max_tokens", -1, 0),
    "n_probs": _wish("ask with logprobs", 0),
    # answers in a form, and other models
    "grammar": _wish(_STRUCTURED),
    "json_schema": _wish(_STRUCTURED),
    "regex": _wish(_STRUCTURED),
    "ebnf": _wish(_STRUCTURED),
    "structural_tag": _wish(_STRUCTURED),
    "format": _wish(_STRUCTURED, "", "text"),
    "lora": _wish(_ADAPTERS),
    "lora_path": _wish(_ADAPTERS),
    "adapter_id": _wish(_ADAPTERS),
    # what the chat and completion routes have, where a route does not declare it itself
    **{
        name: _wish(f"this route has no {name}; /v1/chat/completions has", *neutral)
        for name, neutral in {
            "n": (1,),
            "min_tokens": (0,),
            "max_tokens": (),
            "max_completion_tokens": (),
            "top_k": (0, -1),
            "min_p": (0,),
            "presence_penalty": (0,),
            "frequency_penalty": (0,),
            "repetition_penalty": (1,),
            "seed": (),
            "stop": (),
            "stop_token_ids": (),
            "ignore_eos": (),
            "logit_bias": (),
            "allowed_token_ids": (),
            "bad_words": (),
            "prompt_logprobs": (),
            "truncate_prompt_tokens": (),
            "repetition_detection": (),
            "response_format": ({"type": "text"},),
        }.items()
    },
}


def refuse_unsupported_fields(fields: Mapping[str, Any] | None, n: int = 1) -> None:
    """Raises Unsupported, naming the field and the reason. `fields`: those that a route does not
    declare itself; `best_of` may equal `n`."""
    for name, value in (fields or {}).items():
        wish = _WISHES.get(name)
        if wish is None or _is_neutral(wish, value) or (name == "best_of" and value == n):
            continue
        if wish.switch is not None and _is_off(wish.switch, fields or {}):
            continue
        raise Unsupported(f"{name}: {wish.reason}.", param=name)


def _is_off(switch: str, fields: Mapping[str, Any]) -> bool:
    """Whether the field that rules others is there and says that they mean nothing."""
    return fields.get(switch) is not None and _is_neutral(_WISHES[switch], fields[switch])


def _is_neutral(wish: _Wish, value: Any) -> bool:
    # 0 and False are equal, and so are 1 and True; here they are not the same.
    return value is None or any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in wish.neutral
    )
