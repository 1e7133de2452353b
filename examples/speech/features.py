"""Features of sounds, by torch alone. Padding bears on none of them."""

import torch


def lengths_of(relative, longest):
    """Return the lengths of padded rows as whole numbers.

    Args:
        relative: shape (batch,): which part of each row is real, from 0 to 1.
        longest: length of the rows.
    """
    return (relative * longest).round().long()


def is_real(lengths, longest):
    """Return a mask, shape (batch, longest): what is no padding."""
    return torch.arange(longest, device=lengths.device) < lengths.unsqueeze(1)


class LogBands(torch.nn.Module):
    """The logarithm of the power in bands of equal width, for each frame.

    Args:
        n_fft: samples of a frame.
        hop_length: samples from one frame to the next.
        n_bands: number of bands.
    """

    def __init__(self, n_fft, hop_length, n_bands):
        super().__init__()
        self.n_fft = n_fft
        self.hop_length = hop_length
        self.n_bands = n_bands
        self.register_buffer("window", torch.hann_window(n_fft))

    def forward(self, wavs):
        """Turn (batch, samples) into (batch, frames, bands)."""
        spectrum = torch.stft(
            wavs,
            self.n_fft,
            self.hop_length,
            window=self.window,
            center=False,
            return_complex=True,
        )
        power = spectrum.abs().square()[:, 1:]  # without the mean
        bands = power.unflatten(1, (self.n_bands, -1)).mean(2)
        return (bands + 1e-3).log().transpose(1, 2)

    def frames(self, samples):
        """Return how many whole frames are in so many samples."""
        return (samples - self.n_fft) // self.hop_length + 1


class MeanNormalization(torch.nn.Module):
    """Subtract the mean of each recording, over its real frames."""

    def forward(self, features, frames):
        """Normalize features, shape (batch, frames, bands); padding becomes 0."""
        real = is_real(frames, features.shape[1]).unsqueeze(2)
        mean = (features * real).sum(1, keepdim=True) / frames.view(-1, 1, 1)
        return (features - mean) * real
