"""Networks: a reverse-mode tape over the package's primitives, layers and a UNet in diffusers' names.

    from fp4bf16 import nn
    from fp4bf16.nn import ops as F

    model = nn.UNet2D(nn.UNetConfig.tiny(caption_vocabulary=100), seed=0)   # pictures NHWC, float32
    loss = F.mean_squared_error(model(x, t, captions=bag), target)          # model(...) is a Variable
    model.zero_grad(); loss.backward()                                      # fills model.flat.grad
    model.flat.data -= 1e-3 * model.flat.grad; model.flat.touch()           # touch(): weights changed, twins
    renew with nn.no_grad(), model.using(average):                                # other weights of the same
    layout
        y = model(x, t, captions=bag).data
    (h,) = nn.grad((nn.grad(loss, [w], create_graph=True)[0] * v).sum(), [w])   # Hessian times v

- `Variable(data, requires_grad)`: ``.data .grad .shape .dtype .backward() .detach() .item()``, operators ``+
  - * / ** @ []``, ``.sum .mean .reshape .transpose .T``. `grad(loss, variables, create_graph=False)`,
    `backward`, `no_grad()`.
- `ops`: every recorded function (``F.conv2d, F.linear, F.attention, F.group_norm, F.log_sigmoid, F.concat,
  ...``).
- `Module`: ``named_parameters() parameters() parameter_count() state_dict() load_state_dict() to(dtype)
  apply_route({pattern: track}) flat using(flat) zero_grad()``; define ``forward``. `flat` has ``data, grad``
  (1-D, entries aligned to 16), ``views(flat_array)`` (by name), ``touch()``.
- Layers: `Linear Conv2d GroupNorm Embedding BagEmbedding Attention ResnetBlock2D Downsample2D Upsample2D
  UpsampledConv2d TimestepEmbedding`; their ``seed=`` takes a number or a `generator(seed)` that several
  layers share.
- `LoRA(unet, rank, alpha, seed, targets)`: low-rank adapters beside a frozen network, with their own
  ``flat``, ``using(flat) disabled() merge() merged_state() detach()``.
- ``with watching(watcher, ...)``: a `Watcher` sees every product of `Linear` and `Conv2d` as it runs, with
  its certificate if it asks for one, may run it on another track and may replace it; `tap(y, on_backward)`
  sees the gradient.
- `UNet2D(UNetConfig)`, whose ``cuda(like)`` moves it to a GPU, where it is one node of the tape;
  `pixel_unshuffle`, `pixel_shuffle`; `load_diffusers`, `from_diffusers`, `to_diffusers`.

Every layer's products run on its ``.track`` (BF16 unless a route says otherwise; ``with fp4bf16.tracks(...)``
wins). On the FP4 track each weight's FP4 twin is prepared once and renewed when the weight's version changes.
Derivatives run on the BF16 track, straight through the quantiser. ``with fp4bf16.tracks("reference")`` rounds
nothing.
"""

from . import ops
from .layers import (
    Attention,
    BagEmbedding,
    Conv2d,
    Downsample2D,
    Embedding,
    GroupNorm,
    Linear,
    ResnetBlock2D,
    TimestepEmbedding,
    Upsample2D,
    UpsampledConv2d,
    generator,
    timestep_embedding,
)
from .loader import from_diffusers, load_diffusers, to_diffusers
from .lora import LoRA
from .module import FlatParameters, Module, Parameter
from .optim import AdamW, clip_norm
from .tape import Variable, backward, grad, no_grad
from .unet import UNet2D, UNetConfig, pixel_shuffle, pixel_unshuffle
from .watch import Estimate, Watcher, tap, track_of, watching

__all__ = [
    "AdamW", "Attention", "BagEmbedding", "Conv2d", "Downsample2D", "Embedding", "Estimate",
    "FlatParameters", "GroupNorm", "Linear", "LoRA", "Module", "Parameter", "ResnetBlock2D",
    "TimestepEmbedding", "UNet2D", "UNetConfig", "Upsample2D", "UpsampledConv2d", "Variable", "Watcher",
    "backward", "clip_norm", "from_diffusers", "generator", "grad", "load_diffusers", "no_grad", "ops",
    "pixel_shuffle", "pixel_unshuffle", "tap", "timestep_embedding", "to_diffusers", "track_of", "watching",
]  # fmt: skip
