"""Options for several replicas behind a router."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Option

from kvsim.cli.options import Bundle
from kvsim.cli.server import SettingOptions, config_path
from kvsim.errors import ConfigError
from kvsim.settings.config import RunConfig, merged, read_toml
from kvsim.settings.limits import REPLICAS, check_size

if TYPE_CHECKING:
    from kvsim.settings.server import ServerWord


@dataclass(frozen=True)
class FleetOptions(Bundle):
    """How many engines there are, and who sends them requests."""

    replicas: Annotated[
        int | None, Option(min=1, metavar="N", help="Simulate N engines and a router.")
    ] = None
    prefill_replicas: Annotated[
        int | None,
        Option(min=1, metavar="N", help="Split prefill and decode: N engines compute prompts."),
    ] = None
    decode_replicas: Annotated[
        int | None, Option(min=1, metavar="N", help="N engines generate the outputs.")
    ] = None
    router: Annotated[
        str | None, Option(metavar="NAME", help="The router: round-robin, dynamo-kv, ...")
    ] = None
    router_set: Annotated[
        list[str] | None, Option(metavar="KEY=VALUE", help="An argument of the router.")
    ] = None

    @property
    def args(self) -> dict[str, Any]:
        """Arguments of the router. Raises `ConfigError`."""
        return dict(map(_argument, self.router_set or ()))

    def table(self) -> dict[str, Any]:
        """What is said of the fleet, as keys of `FleetConfig`; empty if nothing is. Raises
        `ConfigError` for a prefill/decode split, which these keys cannot say."""
        if self._split():
            raise ConfigError(
                "--prefill-replicas: only `kvsim run` and `kvsim compare` split prefill and decode;"
                " leave it and --decode-replicas out"
            )
        return self._said()

    def _said(self) -> dict[str, Any]:
        given = {"replicas": self.replicas, "router": self.router, "router_args": self.args}
        return {key: value for key, value in given.items() if value}

    def _split(self) -> list[dict[str, Any]]:
        """The kinds of replicas of a prefill/decode split; none without one. Raises
        `ConfigError`."""
        from kvsim.run.features.offload import NIXL

        numbers = {"kv_producer": self.prefill_replicas, "kv_consumer": self.decode_replicas}
        if set(numbers.values()) == {None}:
            return []
        if None in numbers.values() or self.replicas is not None:
            raise ConfigError(
                "--prefill-replicas: a prefill/decode split has both sides, and no other replicas;"
                " give --prefill-replicas and --decode-replicas, and leave --replicas out"
            )
        return [
            {"count": number, "kv_transfer_config": {"kv_connector": NIXL, "kv_role": role}}
            for role, number in numbers.items()
        ]

    def load(
        self, config: str | None, settings: SettingOptions, word: ServerWord
    ) -> tuple[list[Fleet], list[RunConfig]]:
        """What the file `config` and flags, which count more, say: a fleet for each router that is
        named, and the settings of the replicas. Without replicas and routers there is no fleet, and
        one engine. Raises `ConfigError`."""
        from kvsim.fleet.settings import FleetConfig, each_kind, make_settings, parted

        path = config_path(config)
        where = path or "configuration"
        said, shared = parted({} if path is None else read_toml(path))
        kinds, said = self._split() or said.get("replicas"), merged(said, self._said())
        if not isinstance(kinds, list):
            configs = [settings.over(shared, where, word)]
            said = _with_ranks(said, configs[0].data_parallel_size)
        elif self.replicas is None:
            configs = [
                loaded
                for count, table, place in each_kind(kinds, shared, where)
                for loaded in [settings.over(table, place, word)] * count
            ]
            said["replicas"] = len(configs)
        else:
            raise ConfigError(f"--replicas: {where} lists its replicas; leave one of the two out")
        fleet = make_settings(said, where)
        if not isinstance(fleet, FleetConfig):
            return [], configs
        check_size("--replicas", fleet.replicas, REPLICAS)
        if not isinstance(kinds, list):
            configs *= fleet.replicas
        return [Fleet(name, fleet.router_args) for name in fleet.router.split(",")], configs


class Fleet(NamedTuple):
    """A router with its arguments."""

    router: str
    args: dict[str, Any]


def only(fleets: list[Fleet]) -> Fleet:
    """Returns the fleet of a run. Raises `ConfigError` if there are several."""
    if fleets[1:]:
        raise ConfigError("--router: a run has one router; `kvsim compare` takes several")
    return fleets[0]


def _with_ranks(said: dict[str, Any], ranks: int) -> dict[str, Any]:
    """What is said of a fleet, where data-parallel ranks are replicas of it. Raises
    `ConfigError`."""
    from kvsim.fleet.settings import RANKS_ROUTER

    if ranks == 1:
        return said
    if said.get("replicas", ranks) != ranks:
        raise ConfigError(
            f"replicas: data_parallel_size {ranks} is simulated as {ranks} replicas; leave one of"
            " the two out"
        )
    return {"replicas": ranks, "router": RANKS_ROUTER, **said}


def _argument(assignment: str) -> tuple[str, Any]:
    """KEY=VALUE; the value as in JSON, or else as text."""
    key, equals, value = assignment.partition("=")
    if not equals or not key.isidentifier():
        raise ConfigError(f"--router-set: {assignment!r} is no KEY=VALUE, as in temperature=0.5")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
