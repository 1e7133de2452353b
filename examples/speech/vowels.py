"""Recordings of vowels, made of harmonics and formants, with noise."""

import random

import torch

# By their numbers; the first is the blank of CTC. Peaks in Hz, of Peterson and Barney (1952).
VOWELS = "_aeiou"
FORMANTS = {"a": (730, 1090), "e": (530, 1840), "i": (270, 2290), "o": (570, 840), "u": (300, 870)}
BANDWIDTH = 90.0  # of a formant, in Hz


def one_vowel(name, pitch, seconds, sample_rate):
    """Return a vowel, shape (samples,): harmonics of the pitch, louder near the two formants."""
    time = torch.arange(int(seconds * sample_rate)) / sample_rate
    frequencies = torch.arange(pitch, sample_rate / 2, pitch)
    loudness = sum(
        1 / (1 + ((frequencies - formant) / BANDWIDTH) ** 2) for formant in FORMANTS[name]
    )
    waves = torch.sin(2 * torch.pi * frequencies.unsqueeze(1) * time)
    sound = (loudness.unsqueeze(1) * waves).sum(0)
    # it rises and falls in 10 ms, and clicks at neither end
    edge = torch.minimum(time, time.flip(0)) / 0.01
    return 0.3 * sound / sound.abs().max() * edge.clamp(max=1)


def recordings(size, seed, sample_rate, noise):
    """Return recordings of 2 to 6 vowels each as dicts of tensors: `sig`, shape (samples,), and
    `tokens`, the numbers of the vowels.
    """
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number in range(size):
        names = chance.choices(VOWELS[1:], k=chance.randint(2, 6))
        pitch = chance.uniform(90, 220)  # of one voice
        parts = []
        for name in names:
            pause = int(chance.uniform(0.03, 0.08) * sample_rate)
            seconds = chance.uniform(0.08, 0.16)
            parts += [torch.zeros(pause), one_vowel(name, pitch, seconds, sample_rate)]
        sound = torch.cat([*parts, torch.zeros(pause)])
        sound += noise * torch.randn(len(sound), generator=generator)
        tokens = torch.tensor([VOWELS.index(name) for name in names])
        samples.append({"id": number, "sig": sound, "tokens": tokens})
    return samples
