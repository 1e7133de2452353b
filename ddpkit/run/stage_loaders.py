"""The loaders of a call of ``fit``, ``evaluate`` or ``predict``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit.run.evaluation_sets import EvaluationSets, sets_of
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddpkit.training import LoaderFactory


class StageLoaders:
    """Makes the loaders of a call, of datasets by the recipe's ``make_dataloader``.

    Args:
        factory: adapts loaders that are made already.
        make_dataloader: of the recipe.

    Ranks: local; alike on every rank.
    """

    def __init__(self, factory: LoaderFactory, make_dataloader: Callable[..., Any]) -> None:
        self._factory = factory
        self._make_dataloader = make_dataloader

    def of(
        self,
        data: Any,
        stage: Stage,
        loader_kwargs: Mapping[str, Any],
        set_name: str = "",
    ) -> Any:
        """Return the loader of a dataset, or of a loader that is divided over the ranks.

        Args:
            data: as it was given.
            stage: of the data.
            loader_kwargs: for ``make_dataloader``.
            set_name: of the data; empty: it has none.
        """
        with self._factory.named(stage, set_name):
            if self._factory.is_loader(data):
                return self._factory.adapt(data, stage)
            return self._make_dataloader(data, stage=stage, **loader_kwargs)

    def of_evaluation(
        self,
        argument: str,
        data: Any,
        stage: Stage,
        loader_kwargs: Mapping[str, Any],
    ) -> EvaluationSets:
        """Return the loaders of a set, or of several by name. They are in no checkpoint.

        Args:
            argument: the name of that which was given.
            data: as it was given.
            stage: VALID or TEST.
            loader_kwargs: for ``make_dataloader``.

        Raises:
            ConfigError: sets by name that cannot be used.
        """
        kwargs = {"ckpt_prefix": None, **loader_kwargs}
        return sets_of(
            argument, data, kwargs, lambda each, name: self.of(each, stage, kwargs, name)
        )
