"""Options that are given, and do not go with what was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpkit.run_opts import RunOptions

ROUNDED = {"check_parity": "it would compare gradients that were rounded"}


def refuse_with(chosen: str, options: RunOptions, reasons: Mapping[str, str]) -> None:
    """Refuse the first option that is given and does not go with what was chosen.

    Args:
        chosen: what was chosen, such as ``"ddp_comm_hook=fp16"``. To the name of an option its
            value is added.
        options: of the run.
        reasons: why an option does not go with it, by ``"name"``; by ``"name=value"`` where it is
            one value.

    Raises:
        ConfigError: an option is given that does not go with it.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> refuse_with("strategy='fsdp'", RunOptions(debug=True), {"debug": "it is not divided"})
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: strategy='fsdp' does not work with debug=True: it is not divided.
        Change one, ...
    """
    if chosen in options:
        chosen = f"{chosen}={options[chosen]}"
    for key, why in reasons.items():
        if is_given(options, key):
            name, _, value = key.partition("=")
            if value == "None":
                raise ConfigError(f"{chosen} needs --{name}: {why}.")
            raise ConfigError(
                f"{chosen} does not work with {name}={options[name]}: {why}. Change one, or leave "
                "it out."
            )


def is_given(options: RunOptions, key: str) -> bool:
    """Say whether an option is given: any value of ``"name"``, or that of ``"name=value"``.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> (
        ...     is_given(RunOptions(ema_decay=0.0), "ema_decay"),
        ...     is_given(RunOptions(strategy="ddp"), "strategy=fsdp"),
        ... )
        (True, False)
    """
    name, _, value = key.partition("=")
    given = str(options[name])  # as text: ema_decay=0.0 is given, and equals False
    return given == value or not (value or given in {"None", "False", "[]", "none"})
