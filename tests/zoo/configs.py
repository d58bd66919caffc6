"""Tiny configurations of transformers' model types, made by shrinking the default one. Pure: builds no model.

Rules on field names do most of it (`PROFILES`); overrides.yaml is the table of what they cannot know.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
import transformers.models.auto.modeling_auto as modeling_auto
import yaml
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WIDTH, INNER, HEAD_DIM, HEADS, KV_HEADS, LAYERS, VOCAB, POSITIONS, EXPERTS = 32, 48, 8, 4, 2, 2, 128, 64, 4
"""Sizes of the first profile. WIDTH = HEADS * HEAD_DIM; INNER differs from WIDTH so that a mix-up shows."""

HEADS_OF_TASKS = (
    *("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "SPEECH_SEQ_2_SEQ"),
    *("CTC", "TDT", "RNNT", "TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM", "PRETRAINING", "OBJECT_DETECTION"),
    *("UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION", "SEMANTIC_SEGMENTATION", "IMAGE_SEGMENTATION"),
    *("DEPTH_ESTIMATION", "MASK_GENERATION", "KEYPOINT_MATCHING", "KEYPOINT_DETECTION", "IMAGE_TO_IMAGE"),
    *("ZERO_SHOT_OBJECT_DETECTION", "MASKED_IMAGE_MODELING", "CAUSAL_IMAGE_MODELING", "IMAGE_MATTING"),
    *("TIME_SERIES_PREDICTION", "POSE_ESTIMATION", "NORMAL_ESTIMATION", "POINTMAP_ESTIMATION", "RETRIEVAL"),
    *("TEXT_RECOGNITION", "TABLE_RECOGNITION", "VISUAL_QUESTION_ANSWERING", "DECISION"),
    *("ZERO_SHOT_IMAGE_CLASSIFICATION", "SEQUENCE_CLASSIFICATION"),
    *("TOKEN_CLASSIFICATION", "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "AUDIO_CLASSIFICATION"),
    *("QUESTION_ANSWERING", "IMAGE", "TEXT_ENCODING", "", "BACKBONE"),
)
"""Auto mappings, most telling first: the class of a type's checkpoint is the first that has the type."""

OTHER_HEADS = (
    *("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION"),
    *("QUESTION_ANSWERING", "SEMANTIC_SEGMENTATION", "", "TEXT_ENCODING", "BACKBONE"),
)
"""Auto mappings of the class that is loaded from the checkpoint of another one: keys are missing and unexpected."""

Value = Any
Override = Mapping[str, Any]

OVERRIDES: dict[str, Override] = yaml.safe_load(Path(__file__).with_name("overrides.yaml").read_text(encoding="utf-8"))
"""Fields to set, by model type; a dotted name reaches into a sub-config. They win over the rules."""

_AS_WHOLE_MODELS = ("beit", "detr", "wav2vec2-bert")
"""Types whose overrides are not for sub-configs of others."""

_NO_SIZE = re.compile(
    r"image_size|img_size|patch|crop|kernel|window|block_size|chunk|pool|bucket|type_vocab|stride|group_size|tile|"
    r"feat_size|feature_sizes|grid|mask_size|input_size|train_size|sizes?_per_|position|num_channels|temporal|pixel|"
    r"segment|^rope|context_size|^max_|^min_|norm_topk|spectrogram|memory_size"
)
_RULES: tuple[tuple[str, int], ...] = (
    (r"(vocab_size|codebook_size|vocab_size_\w+|entity_vocab_size|num_embeddings|vocab_size_base)$", VOCAB),
    (r"(head_dim|d_kv|d_head|kv_channels|head_size|dim_head|dim_per_head|attention_head_size|key_length)$", HEAD_DIM),
    (r"^(rotary_dim|qk_rope_head_dim)$", HEAD_DIM // 2),
    (r"(key_value_heads|kv_heads|num_kv_heads|n_head_kv|multi_query_group_num)$", KV_HEADS),
    (r"(attention_heads|n_heads?|num_heads|attn_heads|nhead|linear_num_\w+_heads)$", HEADS),
    (r"(lora_rank|low_rank|dt_rank|time_step_rank|state_size|d_state)$", 8),
    (r"(n_groups?|n_group|topk_group|num_expert_groups?)$", 1),
    (r"(experts_per_tok|experts_per_token|moe_topk|top_k_experts|num_selected_experts|moe_top_k|moe_k)$", 2),
    (r"(num_experts|routed_experts|local_experts|n_experts|expert_num|num_local_experts|moe_num_experts)$", EXPERTS),
    (r"^(first_k_dense_replace|max_window_layers|num_nextn_predict_layers|first_num_dense_layers)$", 1),
    (r"^num_filters$", 4),
    (r"^upsample_groups$", WIDTH),
    (r"^upsample_initial_channel$", 2 * WIDTH),
    (r"(layers|n_layer|depth|num_blocks|layers_per_\w+|per_block)$", LAYERS),
    (r"(max_position_embeddings|n_positions|max_seq_len|n_ctx|position_embeddings|_positions)$", POSITIONS),
    (r"(intermediate|ffn|d_ff|inner|mlp|feedforward|feed_forward|linear_units)", INNER),
    (
        r"(size|sizes|dims?|width|channels|n_embd|rank|filters|features|d_model|d_latents|planes|dimension|_units)$",
        WIDTH,
    ),
)
"""(pattern of a field name, the largest value it may keep), first match wins."""

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "depth")
_LAYER_INDICES = re.compile(r"(index|indexes|indices|idxs|layer_ids|_layers|attention_blocks|block_ids)$")
_TOKEN = re.compile(r"(token_id|token_index|token_idx|_id|token_ids|_token|_index)$")


def model_types() -> list[str]:
    """Returns every model type that some auto mapping has a model class for."""
    return sorted({name for task in _tasks() for name in _mapping(task)})


def classes_of(model_type: str) -> list[str]:
    """Returns the type's classes, those that are most telling first."""
    found = [_class_in(task, model_type) for task in (*HEADS_OF_TASKS, *_tasks())]
    return list(dict.fromkeys(name for name in found if name is not None))


def other_class(model_type: str, cls: str) -> str | None:
    """Returns another class to load from the checkpoint of `cls`: keys are missing and unexpected then."""
    for name in (_class_in(task, model_type) for task in OTHER_HEADS):
        if name not in (None, cls) and _config_class(name) is _config_class(cls):  # else it ignores the saved config
            return name
    return None


def _config_class(cls: str) -> type | None:
    return getattr(getattr(transformers, cls), "config_class", None)


def tiny_configs(model_type: str) -> Iterator[tuple[str, Callable[[], PreTrainedConfig]]]:
    """Yields (name of the profile, maker of a tiny configuration): smallest first, the later ones change less."""
    for profile in PROFILES:
        yield profile, lambda profile=profile: _tiny(CONFIG_MAPPING[model_type], profile, _nested(model_type))


def _tasks() -> list[str]:
    found = (re.fullmatch(r"MODEL(?:_FOR_(\w+))?_MAPPING_NAMES", name) for name in dir(modeling_auto))
    return [match[1] or "" for match in found if match]


def _mapping(task: str) -> Mapping[str, Any]:
    name = f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES"
    mapping: Mapping[str, Any] = getattr(modeling_auto, name, {})
    return mapping


def _class_in(task: str, model_type: str) -> str | None:
    found = _mapping(task).get(model_type)
    name = found if isinstance(found, str) or found is None else found[0]
    return name if name is None or hasattr(transformers, name) else None


def _nested(model_type: str) -> dict[str, Any]:
    """Returns the overrides of a type as nested dicts, one level per dot."""
    nested: dict[str, Any] = {}
    for dotted, value in OVERRIDES.get(model_type, {}).items():
        *path, last = dotted.split(".")
        level = nested
        for name in path:
            level = level.setdefault(name, {})
        level[last] = value
    return nested


def _tiny(
    config_class: type[PreTrainedConfig],
    profile: str,
    overrides: Mapping[str, Any],
    given: PreTrainedConfig | None = None,
) -> PreTrainedConfig:
    """Returns a small configuration of `config_class`, starting from `given` or from its defaults."""
    config = given if given is not None else config_class()
    values = {
        field.name: config.__dict__[field.name]
        for field in dataclasses.fields(config)
        if field.init and field.name in config.__dict__ and not field.name.startswith("_")
    }
    own = {
        name: value
        for name, value in overrides.items()
        if not isinstance(values.get(name), PreTrainedConfig) or not isinstance(value, dict) or "model_type" in value
    }
    kwargs: dict[str, Any] = {}
    for name, value in values.items():
        if name in own:
            continue
        if isinstance(value, PreTrainedConfig):
            inner = overrides.get(name, {})
            own_type = {} if value.model_type in _AS_WHOLE_MODELS else _nested(value.model_type)
            kwargs[name] = _tiny(type(value), profile, {**own_type, **inner}, value)
        else:
            small = _small(name, value, profile)
            if small is not value and small != value:
                kwargs[name] = small
    kwargs |= _fewer_layers(config, values, kwargs)
    if given is not None:  # what is not a field of the class, or differs from its default, would get lost
        kwargs = {**_explicit(config, values), **kwargs}
        if config.__dict__.get("_out_features") and "out_indices" not in kwargs:
            kwargs["out_features"] = list(config.__dict__["_out_features"])
    kwargs |= own
    return config_class(**kwargs)


def _explicit(config: PreTrainedConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields in which `config` differs from the defaults of its class."""
    try:
        defaults = type(config)().__dict__
    except Exception:
        defaults = {}
    return {
        name: value
        for name, value in values.items()
        if not isinstance(value, PreTrainedConfig) and (name not in defaults or defaults[name] != value)
    }


def _small(name: str, value: Value, profile: str) -> Value:
    if isinstance(value, bool) or not isinstance(value, int | list | tuple) or not value:
        return value
    if isinstance(value, list | tuple):
        if _LAYER_INDICES.search(name):
            return value
        small = [_small(name if name != "depths" else "depth", item, profile) for item in value]
        if name.startswith("depth") or name in ("num_block_repeats", "stage_num_blocks", "layer_depths"):
            small = [1 if isinstance(item, int) else item for item in small]
        elif profile == "uniform" and _is_heads(name):
            small = [HEADS // 2] * len(small)
        return type(value)(small) if small != list(value) else value
    if _TOKEN.search(name):
        return value % POSITIONS if value >= POSITIONS else value
    return PROFILES[profile](name, value)


def _is_heads(name: str) -> bool:
    return re.search(r"num_(attention_)?heads$|n_heads?$", name) is not None


def _limit(name: str) -> int | None:
    if re.search(r"vocab|codebook|embeddings|_positions$|max_seq_len$", name) and "type_vocab" not in name:
        return VOCAB if "vocab" in name or "codebook" in name else POSITIONS
    for pattern, limit in _RULES:
        if re.search(pattern, name):
            return None if limit in (WIDTH, INNER) and _NO_SIZE.search(name) else limit
    return None


def _uniform(name: str, value: int) -> int:
    limit = _limit(name)
    return value if limit is None or value <= limit else limit


def _scaled(name: str, value: int) -> int:
    """Divides widths by 8 and leaves the number of heads: ratios between widths stay."""
    limit = _limit(name)
    if limit is None or value <= limit or (limit in (HEADS, KV_HEADS) and "head" in name):
        return value
    if limit in (WIDTH, INNER, HEAD_DIM) and not re.search(r"vocab|codebook|expert|group", name):
        return max(value // 8, 1) if value >= 64 else value
    return limit


def _shallow(name: str, value: int) -> int:
    """Leaves all widths; only what multiplies gets smaller."""
    limit = _limit(name)
    if limit is None or value <= limit or limit in (WIDTH, INNER, HEAD_DIM, HEADS, KV_HEADS) or "head" in name:
        return value
    return limit if re.search(r"layer|depth|block|vocab|codebook|expert|position|seq_len|n_ctx", name) else value


PROFILES: dict[str, Callable[[str, int], int]] = {"uniform": _uniform, "scaled": _scaled, "shallow": _shallow}
"""By name: (field name, value) -> smaller value."""


def _fewer_layers(config: PreTrainedConfig, values: Mapping[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keeps the layers that show every kind of layer, and cuts the lists that have one entry per layer to them."""
    changed: dict[str, Any] = {}
    counter = next((name for name in _LAYER_COUNTS if isinstance(values.get(name), int)), None)
    if counter is None or counter not in kwargs:
        return changed
    count = values[counter]
    per_layer = {
        name: list(value)
        for name, value in values.items()
        if isinstance(value, list | tuple) and len(value) == count and not _LAYER_INDICES.search(name)
    }
    stages = list(config.__dict__.get("_out_indices") or [])
    kept = max(LAYERS, len(stages)) if stages else LAYERS
    if per_layer:
        kinds: dict[str, int] = {}
        for index in range(count):
            kinds.setdefault(repr([value[index] for value in per_layer.values()]), index)
        chosen = sorted(kinds.values()) if len(kinds) <= 6 else list(range(kept))
        chosen += [index for index in range(count) if index not in chosen][: max(0, kept - len(chosen))]
        chosen.sort()
        for name, value in per_layer.items():
            cut = kwargs.get(name, value)
            changed[name] = type(values[name])(cut[index] for index in chosen)
        kept = len(chosen)
    changed[counter] = kept
    for name, value in values.items():
        if isinstance(value, list | tuple) and value and _LAYER_INDICES.search(name) and isinstance(value[0], int):
            changed[name] = type(value)(sorted({min(item, kept - 1) for item in value}))
    if stages:
        changed["out_indices"] = list(range(1, kept + 1))[-len(stages) :]
    return changed
