"""`--limits-file`: what each client may ask for at once and over time, as YAML.

    default:                      # for clients that are not named; all fields are optional
      max_concurrent: 8           # generations at once
      tokens_per_minute: 60000    # prompt and generated tokens
    clients:                      # API keys, or values of the field user (see below)
      sk-team-a:
        name: team-a              # what messages and metrics call it
        max_concurrent: 32
        weight: 3                 # share under --scheduling-policy fair, relative to others

Limits say what is refused, weights who goes first among what is not: they do not touch each other.
A named client takes from `default` what its entry leaves out.

Whose limits: those of the API key, whatever `user` a request gives. Only with a single key that is
not named itself, a `user` that is named has its own. Without keys each `user` has its own; clients
choose it themselves, so that holds friends to their shares, and no stranger to anything.

`tokens_per_minute` is charged when a request comes: its prompt, and for each completion its
`max_tokens`, or if it gives none what the client's completions had of late. What was not generated
is given back at the end. A request is let in while anything is left, if need be on credit, so that
none is too large for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serve.api.clients.client import ClientEntry, Clients
from serve.config import ServerConfig
from serve.errors import ConfigError
from serve.settings_file import read_yaml


class LimitsFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    default: ClientEntry = ClientEntry()
    clients: Mapping[str, ClientEntry] = Field(default_factory=dict)

    def entry_of(self, client: str) -> ClientEntry:
        """What holds for an API key or user."""
        own = self.clients.get(client)
        if own is None:
            return self.default
        return self.default.model_copy(update=own.model_dump(exclude_unset=True))


def known_clients(config: ServerConfig) -> Clients:
    """Who the operator knows, and what holds for whom. Raises ConfigError."""
    limits = read_limits(config)
    return Clients(config, limits.default, {name: limits.entry_of(name) for name in limits.clients})


def read_limits(config: ServerConfig) -> LimitsFile:
    """The file that the settings name; without one, no limits. Raises ConfigError."""
    if config.limits_file is None:
        return LimitsFile()
    path = Path(config.limits_file).expanduser()
    content = read_yaml(path, "--limits-file")
    try:
        limits = LimitsFile.model_validate({} if content is None else content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"--limits-file {path}: {field}: {first['msg']}.") from error
    for pair in config.client_weight:
        client = pair.rpartition("=")[0]
        if client in limits.clients and limits.clients[client].weight is not None:
            raise ConfigError(
                f"--limits-file {path}: clients.{client}.weight is also given by --client-weight; "
                "keep one of them."
            )
    return limits
