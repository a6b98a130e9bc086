"""Every setting, in one table, with its unit and its default. Values come from arguments, from `PREFIXCACHE_*`
variables or from a TOML file (the one that `PREFIXCACHE_CONFIG` names), in this order of precedence. A bad setting is
an error here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    Secret,
    SecretStr,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from prefixcache.byte_sizes import as_setting, parse_size


def _auto_size(value: Any, info: ValidationInfo) -> Any:
    return value if value == "auto" else parse_size(value, info.field_name or "size")


def ram_auto(memory: int, weights: int = 0) -> int:
    """Return the RAM budget, in bytes, that ram="auto" is on a machine with `memory` bytes (on a Mac: of Metal's recommended
    working set) where models of `weights` bytes are loaded: a quarter of the memory, or what the weights and an eighth of the
    memory, for requests under way, leave of it, whichever is less; a 64th at least.
    """
    return max(min(memory // 4, memory - memory // 8 - weights), memory // 64)


HOT_SHARE, DEVICE_SHARE = 4, 8  # hot="auto" is a 4th of the RAM budget, or an 8th of a GPU's own memory
QUEUE_SHARE = 4  # spill_queue="auto" is a 4th of the RAM budget
IDLE_SHARE, IDLE_LEAST = 10, 10**9  # spill_idle="auto" is a 10th of the SSD's limit, or so many bytes
BASIS_DIR = Path("~/.cache/prefixcache-bases")  # one for all servers of a user: a basis is of a model, not of a cache

AutoSize = Annotated[int | Literal["auto"], BeforeValidator(_auto_size)]


class Settings(BaseSettings):
    """How a `PrefixCache` is to be. All sizes are in bytes, all times in seconds."""

    model_config = SettingsConfigDict(env_prefix="PREFIXCACHE_", extra="forbid", frozen=True, validate_default=True)

    ram: AutoSize = Field(
        "auto",
        description='hard RAM budget. "auto": a quarter of the memory; under serve at most 7/8 of it less the weights',
    )
    hot: AutoSize = Field(
        "auto",
        description="of ram, for the decoded state of the prompts used last: a hit has nothing to decode. It takes what is "
        'free, and leaves before any image. On an NVIDIA GPU it is of its memory instead. "auto": a quarter of the budget, '
        "or an eighth of the GPU's memory. 0: none",
    )
    decline_slow_hits: bool = Field(
        False,
        description="give no hit, or only what is hot of it, where computing is clearly quicker: fetches and prefills are "
        "measured. serve does so, unless told otherwise",
    )
    ssd_dir: Path | None = Field(None, description="directory of the SSD tier; none: RAM only")
    ssd: AutoSize = Field(
        "auto", description='limit of the directory on disk. "auto": half of the free space. 0: RAM only'
    )
    ssd_reserve: AutoSize = Field(
        "auto",
        description="evict from the SSD while its disk has less space free, and write nothing that would take it. "
        '"auto": a 20th of the disk, at most 4 GB. 0: only what a full disk asks for',
    )
    ssd_missing: Literal["error", "wait"] = Field(
        "error",
        description='while the disk of ssd_dir is not there: "error": refuse, or make the folders as far as rights go; '
        '"wait": RAM only until it is. serve waits, unless told otherwise',
    )
    codec: Any = Field(None, description='a codec, its spec, or text such as "turboquant:4:3", "transform:4", "raw"')
    basis_dir: Path = Field(
        BASIS_DIR, description="folder where `prefixcache calibrate` leaves what codec transform needs"
    )

    memory_reserve: AutoSize = Field(
        "auto", description='evict from RAM while the machine has less memory free. "auto": a 64th of it. 0: never'
    )
    spill: Literal["drop", "wait", "through"] = Field(
        "drop",
        description='when the spill queue is full: "drop" what is evicted, or "wait" for room; "through": drop, but write '
        "each block as soon as it is whole",
    )
    spill_wait: float = Field(2.0, ge=0, le=60, description='spill="wait": the longest that one store waits')
    spill_queue: AutoSize = Field(
        "auto", description='bytes that may wait for the SSD. "auto": a quarter of the budget'
    )
    spill_idle: AutoSize = Field(
        "auto",
        description="bytes a day that are written to the SSD while nobody asks: whole blocks that only RAM has. "
        '"auto": a 10th of ssd, 1 GB at least; without spill_on_close none. 0: none',
    )
    spill_on_close: bool = Field(True, description="close() flushes RAM to the SSD, so that a restart is warm")
    close_timeout: float = Field(120.0, gt=0, le=86_400, description="the longest that close() waits for the SSD")
    readers: int = Field(4, ge=1, le=64, description="threads that read from the SSD")
    allow_classes: tuple[str, ...] = Field((), description="cache classes beyond mlx-lm's that may be restored by name")

    remote: SecretStr | None = Field(
        None,
        description="engine that machines share their prompts in: s3://BUCKET/PREFIX, valkey://HOST:PORT, file:///FOLDER",
    )
    remote_key_file: Path | None = Field(
        None, description="file with the 64 hex digits that seal what is shared; the same on all machines"
    )
    remote_ca_file: Path | None = Field(
        None, description="certificates (PEM) of who may sign the engine's, beside the usual ones"
    )
    remote_admission: Literal["second", "always", "never"] = Field(
        "second",
        description='images go to the engine from their "second" use on, "always" as they are stored, or "never"',
    )
    remote_timeout: float = Field(
        5.0, gt=0, le=600, description="the longest that one call of the engine, or the reading of one prompt, takes"
    )

    policy: Literal["lru", "adaptive"] = Field("lru", description="eviction policy, in RAM and on SSD")
    ssd_admission: Literal["always", "second"] = Field(
        "always",
        description='what RAM evicts is written to the SSD "always", or from its "second" use on; close() writes all',
    )
    lease_share: float = Field(
        0.25,
        ge=0,
        le=1,
        description="of the SSD's limit, or without one of ram, that one tenant's leases may take; beyond it the oldest "
        "ends. 0: none are given",
    )
    trace: Path | None = Field(None, description="record who asks for what, for `prefixcache plan`: no text, no tokens")
    cold_below: float = Field(
        0.5,
        ge=0,
        le=1,
        description="serve says why a request is cold that hits less than this share of its prompt. 0: never",
    )

    def __init__(self, **values: Any):
        self._no_other_variables()
        super().__init__(**values)

    @classmethod
    def _no_other_variables(cls) -> None:
        """Raise ValueError for a variable that is misspelt: it would be a setting that silently does nothing."""
        settings = {f"PREFIXCACHE_{name.upper()}" for name in cls.model_fields}
        others = {"PREFIXCACHE_CONFIG", "PREFIXCACHE_ADMIN_KEY"}  # in capitals only
        for name in os.environ:
            if name.upper().startswith("PREFIXCACHE_") and name.upper() not in settings and name not in others:
                raise ValueError(
                    f"{name}: no such setting; write {_meant(name.upper(), settings | others)}, or unset it"
                )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        config = os.environ.get("PREFIXCACHE_CONFIG")
        if not config:
            return init_settings, env_settings
        if not Path(config).expanduser().is_file():
            raise ValueError(f"PREFIXCACHE_CONFIG={config!r}: no such file; name a TOML file or unset it")
        return init_settings, env_settings, _toml(settings_cls, Path(config).expanduser())

    @classmethod
    def from_toml(cls, path: str | Path, **values: Any) -> Settings:
        """Read settings from a TOML file; `values` and variables stand above it. Raises FileNotFoundError when it isn't
        there.
        """
        path = Path(path).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; give the path of a TOML file of settings")
        source = _toml(cls, path)()
        variables = {name.upper() for name in os.environ}  # pydantic-settings takes them in any case
        taken = {name for name in cls.model_fields if f"PREFIXCACHE_{name.upper()}" in variables}
        return cls(**{**{name: value for name, value in source.items() if name not in taken}, **values})

    @field_validator("ram")
    @classmethod
    def _some_ram(cls, value: int | str) -> int | str:
        if value == 0:
            raise ValueError('ram=0: nothing could be kept; give ram a size, such as "1GB"')
        return value

    @field_validator("ssd_dir", "basis_dir", "trace", "remote_key_file", "remote_ca_file")
    @classmethod
    def _expand(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        try:
            return value if value is None else value.expanduser().absolute()
        except RuntimeError:  # no such user
            raise ValueError(f"{info.field_name}={str(value)!r}: no such home; write the whole path") from None

    @field_validator("ssd_dir", "basis_dir", "trace", "remote_key_file", "remote_ca_file", mode="before")
    @classmethod
    def _not_empty(cls, value: Any, info: ValidationInfo) -> Any:
        if value == "":  # pathlib takes it for the current directory
            wanted = {
                "ssd_dir": "a directory; write its path, or leave it out for RAM only",
                "basis_dir": "a folder; write its path, or leave it out for the usual one",
                "trace": "a file; write its path, or leave it out to record nothing",
                "remote_key_file": "a file; write its path, or leave it out",
                "remote_ca_file": "a file; write its path, or leave it out for the usual certificates",
            }
            raise ValueError(f"{info.field_name}='': not {wanted[info.field_name or '']}")
        return value

    @field_validator("codec", mode="before")
    @classmethod
    def _codec(cls, value: Any) -> Any:
        if value is None:
            return None
        # Codecs stand above settings (they need MLX), so they are only looked up when one is to be checked.
        from prefixcache.codecs.choice import as_codec

        try:
            return as_codec(value)
        except TypeError as error:  # pydantic passes on ValueErrors only
            raise ValueError(str(error)) from None

    @field_serializer("codec")
    def _spec(self, codec: Any) -> Any:
        return None if codec is None else codec.spec()

    @model_validator(mode="after")
    def _together(self) -> Settings:
        if self.spill == "through" and self.ssd_admission == "second":
            raise ValueError(
                'spill="through" with ssd_admission="second": one writes each block at once, the other not before its second '
                "use; choose one of them"
            )
        if self.ssd != 0 and self.model_fields_set & {"ssd", "ssd_dir"} == {"ssd"}:
            limit = self.ssd if self.ssd == "auto" else as_setting(self.ssd)
            raise ValueError(f'ssd="{limit}" without ssd_dir: no directory to keep it in; name one, or leave ssd out')
        return self

    @model_validator(mode="before")
    @classmethod
    def _no_other_settings(cls, values: Any) -> Any:
        for name in values if isinstance(values, dict) else ():
            if name not in cls.model_fields:
                raise ValueError(f"{name}: no such setting; write {_meant(str(name), cls.model_fields)}")
        return values

    @model_validator(mode="wrap")
    @classmethod
    def _hide_passwords(cls, values: Any, handler: ModelWrapValidatorHandler[Settings]) -> Settings:
        """Hide passwords before anything is checked. It stands below `_together`, so that it is outside of it."""
        return handler(
            {name: hidden(name, value) for name, value in values.items()} if isinstance(values, dict) else values
        )

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, hidden(name, value))  # they are frozen: all it does is to show the value in an error

    def ram_bytes(self, memory: int) -> int:
        """Return the RAM budget on a machine with `memory` bytes (on a Mac: of Metal's recommended working set). It does not
        know of weights: who has loaded a model gives `PrefixCache.resize` what `ram_auto` says, as `prefixcache serve` does.
        """
        return ram_auto(memory) if self.ram == "auto" else self.ram

    def reserve_bytes(self, memory: int) -> int:
        """Return what the machine, which has `memory` bytes, is to have free."""
        return memory // 64 if self.memory_reserve == "auto" else self.memory_reserve

    def ssd_reserve_bytes(self, directory: Path) -> int:
        """Return what is to stay free on the disk of the SSD's directory."""
        if self.ssd_reserve != "auto":
            return self.ssd_reserve
        return min(shutil.disk_usage(_existing(directory)).total // 20, 4 * 10**9)

    def hot_bytes(self, ram: int, device: int | None = None) -> int:
        """Return what hot prompts may take of a RAM budget of `ram`, or of the memory that the device has of its own."""
        if self.hot == "auto":
            return ram // HOT_SHARE if device is None else device // DEVICE_SHARE
        return min(self.hot, ram if device is None else device)

    def queue_bytes(self, ram: int) -> int:
        """Return how many bytes may wait for the SSD, beside a RAM budget of `ram`."""
        return ram // QUEUE_SHARE if self.spill_queue == "auto" else self.spill_queue

    def idle_bytes(self, limit: int) -> int:
        """Return what may be written in a day while nobody asks, to an SSD of this limit."""
        if self.spill_idle == "auto":
            return max(limit // IDLE_SHARE, IDLE_LEAST) if self.spill_on_close else 0
        return self.spill_idle

    def ssd_bytes(self, directory: Path, beside: Iterable[Path] = ()) -> int:
        """Return the SSD limit. "auto" is half of what is free, with what the directory holds already, and those `beside` it
        that share the limit, counted as free.
        """
        if self.ssd != "auto":
            return self.ssd
        where = _existing(directory)
        held = sum(map(_held, (directory, *beside)))
        limit = (shutil.disk_usage(where).free + held) // 2
        if not limit:
            raise ValueError(
                f"ssd='auto': no space left on the disk of {str(directory)!r}; make room, or give ssd a size"
            )
        return limit


def hidden(name: Any, value: Any) -> Any:
    """Return the value of the setting `name`; where it may hold a password, in a wrapper that errors show as asterisks."""
    if name in Settings.model_fields and name != "remote" and not (isinstance(value, str) and "://" in value):
        return value
    if value is None or isinstance(value, Secret | SecretStr):
        return value
    return SecretStr(value) if isinstance(value, str) else Secret(value)


def _existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that there is."""
    while not path.exists():
        path = path.parent
    return path


def _held(folder: Path) -> int:
    """Return what all that is in a folder takes on disk, 0 where there is none. Others may delete some of it meanwhile."""
    files = (os.path.join(above, name) for above, below, names in os.walk(folder) for name in (*below, *names))
    return sum(map(_disk, files))


def _disk(file: str) -> int:
    try:
        return os.lstat(file).st_blocks * 512
    except FileNotFoundError:  # deleted meanwhile
        return 0


def _toml(settings: type[BaseSettings], path: Path) -> TomlConfigSettingsSource:
    try:
        source = TomlConfigSettingsSource(settings, path)
    except ValueError as error:
        raise ValueError(f"{path}: not TOML: {error}; mend the file") from None
    for key in source():
        if key not in settings.model_fields:
            name = key.lower().replace("-", "_").removeprefix("prefixcache_")
            raise ValueError(
                f"{path}: {key!r}: no such setting; write {_meant(name, settings.model_fields)}, or delete it"
            )
    return source


def _meant(name: str, known: Iterable[str]) -> str:
    """Return the known name that `name` was probably meant to be, or all of them."""
    near = get_close_matches(name, known := sorted(known), 1, 0.8)
    return near[0] if near else f"one of {', '.join(known)}"
