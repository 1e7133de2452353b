"""Run an untouched SpeechBrain recipe with its training core answered by ddpkit.

Three ways to switch it on, and none of them is ``import ddpkit``::

    python -m ddpkit.speechbrain train.py hparams.yaml                     one process
    torchrun --nproc_per_node=2 -m ddpkit.speechbrain train.py hparams.yaml
    import ddpkit.speechbrain                                              as the first line of train.py

From then on the modules in :data:`~ddpkit.porting.answers.ANSWERED` have ddpkit's names, in
Python and in YAML; all else of ``speechbrain`` is what is installed. Processes that this one starts
find it in their environment (``DDPKIT_SPEECHBRAIN``, and a folder in ``PYTHONPATH``). With
``DDPKIT_SPEECHBRAIN=0`` nothing is answered, and the recipe runs as before.

Importing this package changes the process, on purpose, unlike any other module of ddpkit. It is the
switch alone: what knows SpeechBrain is ``ddpkit.porting``.

Raises:
    ConfigError: when imported, if SpeechBrain has been imported already.
"""  # noqa: E501

from __future__ import annotations

from ddpkit.porting import install, is_switched_off

if not is_switched_off():
    install()
