"""Loading a model with its tokenizer, and binding a loaded model to its identity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvcdn.digest import Digest
from kvcdn.errors import CorruptError, KvcdnError, UnsupportedModelError, UsageError
from kvcdn.keys import ModelIdentity
from kvcdn.model.adapters import AdapterState, adapter_state, attach_adapters, bind_adapters, unwrapped
from kvcdn.model.checkpoint import Checkpoint, resolve_checkpoint
from kvcdn.model.fingerprint import fingerprint_checkpoint, flat_config, relevant_config
from kvcdn.model.place import device_of, layer_devices
from kvcdn.model.probe import probe_layout
from kvcdn.model.processor import describe_devices
from kvcdn.model.rope import steady_tokens
from kvcdn.model.weights import require_checkpoint_weights
from kvcdn.producer import MAX_TEXT, Producer

LOAD_ERRORS = (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError, StrictDataclassError)
"""What transformers raises for files it cannot make a model or a tokenizer of."""


_EVAL = "call model.eval() first"


@dataclass(frozen=True)
class _Files:
    """What a model was loaded from: its checkpoint's fingerprint and folder, and the folders of its adapters by name."""

    fingerprint: Digest
    folder: Path
    adapters: Mapping[str, Path]


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, its tokenizer, and what its KV is bound to."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    identity: ModelIdentity
    _files: _Files = field(repr=False)
    _adapters: AdapterState = field(repr=False)
    _config: Mapping[str, Any] = field(repr=False)

    def current(self) -> LoadedModel:
        """The same model with the identity that the adapters it applies now give it; ask before every prompt.

        Raises UnsupportedModelError for adapters whose files are not known, or are not what is in memory, and for a model that
        was set to compute otherwise: another configuration, training, autocast to another dtype.
        """
        self._require_same_settings()
        state = adapter_state(self.model)
        if state == self._adapters:
            return self
        identity = replace(self.identity, fingerprint=_bound_fingerprint(self.model, state, self._files))
        return replace(self, identity=identity, _adapters=state)

    def _require_same_settings(self) -> None:
        model, place = self.model, device_of(self.model).type
        if found := _in_training(model):
            raise UnsupportedModelError(found, hint=_EVAL)
        _require_not_compiled((model, getattr(model, model.base_model_prefix, model)))
        _require_equal(_told(model.config), self._config, "it was bound with")
        if torch.amp.is_autocast_available(place) and torch.is_autocast_enabled(place):
            dtype = torch.get_autocast_dtype(place)
            if dtype != model.dtype:
                raise UnsupportedModelError(
                    f"autocast has a model of {model.dtype} compute in {dtype}, and its cache is another"
                )

    @property
    def producer(self) -> Producer:
        """What computes here: versions, device and its processor, attention kernel, and the schedule of one pass per block."""
        return Producer(
            torch=str(torch.__version__),
            transformers=transformers.__version__,
            device=describe_devices(layer_devices(self.model, self.identity.layout))[:MAX_TEXT],
            attention=str(self.model.config._attn_implementation),  # noqa: SLF001 - the library offers no public name
            chunk_tokens=self.identity.layout.block_tokens,
        )

    @property
    def steady_tokens(self) -> int | None:
        """The most tokens of a prompt whose keys do not hang on how many there are; None for any number."""
        return steady_tokens(self.model.config.get_text_config(decoder=True))

    def reads(self, tokens: int) -> bool:
        """Whether a prompt of `tokens` tokens has the cache of its beginning that is published."""
        return self.steady_tokens is None or tokens <= self.steady_tokens

    def require_steady(self, tokens: int) -> None:
        """Raises UnsupportedModelError for a prompt that is read with another rope than shorter ones."""
        if not self.reads(tokens):
            raise UnsupportedModelError(
                f"{self.identity.name} reads more than {self.steady_tokens:,} tokens with another rope, so that a prefix has"
                f" other keys there; here are {tokens:,}"
            )

    @property
    def max_positions(self) -> int | None:
        """Positions the model was made for, or None where its configuration does not say."""
        value = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return value if isinstance(value, int) else None


def load_model(name: str, device: str = "cpu", adapters: Sequence[Path] = ()) -> LoadedModel:
    """Loads the model `name` (folder, hub id or alias), with the LoRA adapters in the folders `adapters` active in this order.

    It is bound to its files. Raises a KvcdnError.
    """
    model, tokenizer, checkpoint = load_transformers(name, device)
    return bind_model(model, tokenizer, checkpoint, attach_adapters(model, adapters))


def load_transformers(name: str, device: str = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Checkpoint]:
    """Loads the model `name` in its checkpoint's dtype, ready to run.

    Raises NotFoundError, UnsupportedModelError or UsageError.
    """
    require_device(device)
    checkpoint = resolve_checkpoint(name)
    # The fingerprint comes first: it refuses weights we do not read before anything loads them.
    fingerprint_checkpoint(checkpoint.folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder, dtype="auto", local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except LOAD_ERRORS as error:
        raise UnsupportedModelError(
            f"transformers cannot load {name} as a causal language model: {_first_line(error)}"
        ) from None
    try:
        return model.to(device).eval(), tokenizer, checkpoint
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"the model cannot be moved to the device {device!r}: {_first_line(error)}") from None


def require_device(device: str) -> None:
    """Raises UsageError for what is no device, and for one that is not here: before anything is loaded for it."""
    try:
        asked = torch.device(device)
    except RuntimeError:
        raise UsageError(f"{device!r} is no device", hint="devices are cpu, cuda and cuda:1") from None
    if asked.type != "cuda":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count <= (asked.index or 0):
        here = f"here are {count}" if count else f"torch {torch.__version__} finds no GPU"
        hint = f"cuda:0 to cuda:{count - 1}" if count else "--device cpu, or a driver and a torch that is built for CUDA"
        raise UsageError(f"there is no device {device}: {here}", hint=hint)


def bind_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Checkpoint | str | Path | None = None,
    adapters: Mapping[str, Path] | None = None,
) -> LoadedModel:
    """Binds a model that the caller loaded to its checkpoint's identity; by default the checkpoint it was loaded from.

    `adapters` tells the folder of each LoRA adapter by its name in the model, which may be a model of peft. Raises UsageError
    or UnsupportedModelError where what is in memory cannot be what the files say.
    """
    _require_not_compiled(model.modules() if isinstance(model, torch.nn.Module) else ())
    model = unwrapped(model)
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"{_method(model)} is not supported: of peft only LoRA is")
    if found := _in_training(model):
        raise UsageError(found, hint=_EVAL)
    if checkpoint is None:
        checkpoint = str(model.config._name_or_path)  # noqa: SLF001 - the only record of where it came from
    if isinstance(checkpoint, str | Path):
        checkpoint = resolve_checkpoint(str(checkpoint))
    _require_same_config(model, checkpoint.folder)
    files = _Files(fingerprint_checkpoint(checkpoint.folder), checkpoint.folder, dict(adapters or {}))
    state = adapter_state(model)
    identity = ModelIdentity(_bound_fingerprint(model, state, files), probe_layout(model), checkpoint.name)
    return LoadedModel(model, tokenizer, identity, files, state, _told(model.config))


_SAME_IN_TRAINING = tuple(
    getattr(torch.nn, name) for name in ("ModuleList", "ModuleDict", "Linear", "Embedding", "LayerNorm", "RMSNorm", "Conv1d")
)
"""Layers of torch's that training mode does not change: a model that was given new rows or another list of layers has such."""


def _in_training(model: torch.nn.Module) -> str:
    """What says that `model`, or a part of it, is in training mode; nothing where none is. New adapters often are alone."""
    parts = ((name, part) for name, part in model.named_modules() if type(part) not in _SAME_IN_TRAINING)
    name = next((name for name, part in parts if part.training), None)
    what = f"{name}, a part of the model, is" if name else "the model is"
    return "" if name is None else f"{what} in training mode, where dropout makes its cache random"


def _require_not_compiled(modules: Iterable[Any]) -> None:
    """Raises UnsupportedModelError for torch.compile: what a compiled pass makes of layers that wait was never tried."""
    for module in modules:
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise UnsupportedModelError(
                "a model of torch.compile is not supported", hint="give the model before it is compiled"
            )


def _bound_fingerprint(model: PreTrainedModel, state: AdapterState, files: _Files) -> Digest:
    require_checkpoint_weights(model, files.folder)
    return bind_adapters(model, state, files.fingerprint, files.adapters)


def _method(model: Any) -> str:
    """What a wrapper of peft, or whatever it is, does."""
    methods = {str(config.peft_type.value) for config in getattr(model, "peft_config", {}).values()}
    return " and ".join(sorted(methods - {"LORA"})) or type(model).__name__


def _require_same_config(model: PreTrainedModel, folder: Path) -> None:
    try:
        stored = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except LOAD_ERRORS as error:
        raise CorruptError(f"{folder / 'config.json'} cannot be read: {_first_line(error)}") from None
    _require_equal(_told(model.config), _told(stored), "its checkpoint says")


def _told(config: PretrainedConfig) -> dict[str, Any]:
    """What of a configuration may decide the KV."""
    return flat_config(relevant_config(config.to_dict()))


def _require_equal(is_: Mapping[str, Any], should: Mapping[str, Any], who: str) -> None:
    for key in sorted(is_.keys() | should.keys()) if is_ != should else ():
        if is_.get(key) != should.get(key):
            raise UnsupportedModelError(
                f"the model in memory has {key} = {is_.get(key)!r}, {who} {should.get(key)!r}",
                hint="load the model without overrides, or save it as a checkpoint of its own",
            )


def _first_line(error: BaseException) -> str:
    if isinstance(error, KvcdnError):
        return str(error)
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
