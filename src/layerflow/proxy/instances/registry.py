"""The engines in use, and who of them gets a request."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

from layerflow.config.proxy import InstanceAddress, ProxySettings
from layerflow.errors import ProxyError
from layerflow.proxy.instances.affinity import PrefixTable
from layerflow.proxy.instances.instance import Instance, Role

# Of a prompt's tokens that an engine does not have: a prefiller computes them, a decoder is only sent their KV.
_MISSED_WEIGHT = {Role.PREFILL: 1.0, Role.DECODE: 0.25}


class Registry:
    """Engines by role. An engine that is removed finishes what it has.

    :param clock: monotonic seconds.
    """

    def __init__(self, settings: ProxySettings, clock: Callable[[], float]) -> None:
        self._settings, self._clock = settings, clock
        self._instances: dict[tuple[Role, str], Instance] = {}
        self._retired: list[Instance] = []
        self._picks = itertools.count(1)
        self._numbers = {role: itertools.count(1) for role in Role}
        self.prefixes = PrefixTable(settings.affinity_prefixes)

    def of(self, role: Role) -> list[Instance]:
        return [instance for (of_role, _), instance in self._instances.items() if of_role is role]

    @property
    def all(self) -> list[Instance]:
        return list(self._instances.values())

    def add(self, role: Role, address: InstanceAddress) -> Instance:
        """:raises ProxyError: 409, it is there already."""
        if (role, address.url) in self._instances:
            raise ProxyError(f"{role.value} instance {address.url} is there already", 409)
        made = Instance(role, f"{role.value}-{next(self._numbers[role])}", address, self._settings, self._clock)
        self._instances[role, address.url] = made
        return made

    def remove(self, role: Role, url: str) -> Instance:
        """It gets no more requests. :raises ProxyError: 404, there is none."""
        instance = self._instances.pop((role, url), None)
        if instance is None:
            known = ", ".join(instance.url for instance in self.of(role)) or "none"
            raise ProxyError(f"no {role.value} instance {url}; there are: {known}", 404)
        self._retired.append(instance)
        return instance

    async def close_retired(self) -> None:
        """Close the connections of removed engines that have finished."""
        for instance in [instance for instance in self._retired if not instance.active]:
            self._retired.remove(instance)
            await instance.close()

    async def close(self) -> None:
        """Close every connection."""
        for instance in [*self._instances.values(), *self._retired]:
            await instance.close()

    def pick(
        self,
        role: Role,
        beginnings: Sequence[int],
        tokens: int,
        tried: Collection[Instance] = (),
        wanted: str | None = None,
    ) -> Instance:
        """The engine with the least to do before this prompt's last token: what it has open, and what it lacks of it.

        :param beginnings: of the prompt; see :func:`layerflow.proxy.instances.affinity.digests`.
        :param tokens: of the prompt.
        :param tried: engines that have failed this request.
        :param wanted: ``host:port`` that the client asked for; taken if it can be.
        :raises ProxyError: 503, no engine can take it.
        """
        there = [instance for instance in self.of(role) if instance not in tried]
        usable = [instance for instance in there if instance.usable]
        usable = usable or [instance for instance in there if instance.last_resort]
        if not usable:
            states = ", ".join(f"{instance.name} {instance.state}" for instance in self.of(role)) or "none"
            failed = f", {len(tried)} of them failed this request" if tried else ""
            raise ProxyError(f"no {role.value} engine can take the request: {states}{failed}; try again later", 503)
        asked_for = [instance for instance in usable if instance.url.partition("://")[2] == wanted]
        matched = self.prefixes.matched(beginnings, usable)
        blocks = max(len(beginnings), 1)

        def cost(instance: Instance) -> tuple[float, int]:
            missed = tokens * (1 - matched.get(instance, 0) / blocks)
            return instance.tokens + _MISSED_WEIGHT[role] * missed, instance.last_picked

        picked = min(asked_for or usable, key=cost)
        picked.last_picked = next(self._picks)
        return picked
