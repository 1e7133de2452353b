from __future__ import annotations

import inspect

from torch.utils.data import DataLoader, dataloader
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from ddpkit.dataloader import SaveableDataLoader


def test_nothing_of_torchs_loaders_is_replaced():
    ours = SaveableDataLoader([1, 2, 3], batch_size=1)
    assert len(list(ours)) == len(list(DataLoader([1, 2, 3], batch_size=1))) == 3
    source = inspect.getsourcefile(dataloader)
    classes = (
        DataLoader,
        _BaseDataLoaderIter,
        _SingleProcessDataLoaderIter,
        _MultiProcessingDataLoaderIter,
    )
    replaced = [
        f"{cls.__name__}.{name}"
        for cls in classes
        for name, member in vars(cls).items()
        if inspect.isfunction(member) and member.__code__.co_filename != source
    ]
    assert replaced == []
