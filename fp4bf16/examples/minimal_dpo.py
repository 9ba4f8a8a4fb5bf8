"""The whole idea in one file: explore in FP4, regenerate in BF16, prefer by a reward, train by Diffusion-DPO.

A small diffusion model learns to draw emoji faces. A reward prefers cold colours. In every round the model
draws many candidates cheaply (FP4 track, 4 steps); the best and the worst seeds are drawn again in full
(BF16 track, 10 steps) and scored anew; DPO moves the model towards the winners and away from the losers,
held near where it started.

    python -m fp4bf16.examples.minimal_dpo
"""

from __future__ import annotations

import numpy as np

from fp4bf16 import tracks
from fp4bf16.diffusion import cosine, generate, integers, normal, picture_errors, squared_error
from fp4bf16.nn.optim import AdamW, clip_norm
from fp4bf16.nn.tape import no_grad
from fp4bf16.nn.unet import UNet2D, UNetConfig, pixel_shuffle, pixel_unshuffle
from fp4bf16.train.data import load_pairs

SEED, BATCH, BETA = 0, 32, 2000.0
schedule = cosine(1000)
ROUTE = {
    "conv_in*": "bf16",
    "conv_out*": "bf16",
    "*embedding*": "bf16",
    "*": "fp4",
}  # of the exploring network


def reward(latents: np.ndarray) -> np.ndarray:
    """Blue minus red, averaged over the picture: (n,)."""
    pictures = pixel_shuffle(latents)
    return (pictures[..., 2] - pictures[..., 0]).mean((1, 2))


def predict(model: UNet2D, x: np.ndarray, t: np.ndarray, _=None) -> np.ndarray:
    """The network's velocity, without a tape."""
    with no_grad():
        return model(x, t).data


def draw(model: UNet2D, seeds, steps: int, track: str | None) -> np.ndarray:
    """One picture a seed; track None follows the route, "bf16" overrides it."""
    with tracks(track):
        return generate(lambda *a: predict(model, *a), seeds, None, (8, 8, 12), schedule, steps)


def update(model: UNet2D, optimizer: AdamW, output, gradient: np.ndarray) -> None:
    """One step of AdamW from d loss / d output."""
    model.zero_grad()
    output.backward(gradient)
    clip_norm(model.flat.grad, 1.0)
    optimizer.step(model.flat.grad)
    model.flat.touch()


def train_base(model: UNet2D, pictures: np.ndarray, steps: int) -> None:
    """Velocity prediction: the model learns to draw."""
    optimizer = AdamW(model.flat.data, lr=3e-3)
    for step in range(steps):
        optimizer.lr = 3e-3 * min(1.0, 2.5 * (1 - step / steps))  # falls over the last 40 %
        x0 = pictures[integers(SEED, step, BATCH, 0, len(pictures))]
        t, eps = integers(SEED + 1, step, BATCH, 0, len(schedule)), normal(SEED, step, x0.shape)
        with tracks("bf16"):
            output = model(schedule.add_noise(x0, eps, t), t)
        loss, gradient = squared_error(output.data, schedule.target(x0, eps, t, "v"))
        update(model, optimizer, output, gradient)
        if step % 50 == 49:
            print(f"base   step {step + 1:4d}  loss {loss:.3f}")


def explore(model: UNet2D, round_: int, candidates: int, keep: int) -> tuple[np.ndarray, np.ndarray]:
    """(chosen, rejected): cheap candidates, then the best and the worst of them in full with their true
    rewards.
    """
    seeds = integers(SEED + 2, round_, candidates, 0, 2**32)
    order = np.argsort(-reward(draw(model, seeds, 4, None)))
    kept = seeds[np.concatenate([order[: keep // 2], order[-keep // 2 :]])]
    pictures = draw(model, kept, 10, "bf16")
    order = np.argsort(-reward(pictures))  # the label: rewards of the pictures that are trained on
    return pictures[order[: keep // 2]], pictures[order[keep // 2 :][::-1]]


def dpo_step(
    model: UNet2D, reference: np.ndarray, optimizer: AdamW, chosen, rejected, step: int
) -> tuple[float, float]:
    """L = -log sigmoid(-(beta/2) [(e_w - e_w_ref) - (e_l - e_l_ref)]), same noise for both pictures of a
    pair.
    """
    pairs = len(chosen)
    x0 = np.concatenate([chosen, rejected])
    t = np.tile(integers(SEED + 3, step, pairs, 0, len(schedule)), 2)
    eps = np.tile(normal(SEED + 3, step, chosen.shape), (2, 1, 1, 1))
    x_t, target = schedule.add_noise(x0, eps, t), schedule.target(x0, eps, t, "v")
    with tracks("bf16"):
        with model.using(reference):
            frozen, _ = picture_errors(predict(model, x_t, t), target)
        output = model(x_t, t)
    errors, slope = picture_errors(output.data, target)
    gain = BETA / 2 * (frozen - errors)  # the implicit reward of each picture
    margin = gain[:pairs] - gain[pairs:]
    weight = (
        1 / (1 + np.exp(margin)) / pairs * BETA / 2
    )  # d loss / d error of the chosen; its negative for the rejected
    weight = np.concatenate([weight, -weight]).astype(np.float32)
    update(model, optimizer, output, slope * weight[:, None, None, None])
    return float(np.logaddexp(0, -margin).mean()), float((margin > 0).mean())


def main(base_steps: int = 200, rounds: int = 6) -> tuple[float, float]:
    """Train, align, and return the mean reward of 64 pictures before and after (same noise)."""
    faces = load_pairs(16).select(role="policy", word="face").images.reshape(-1, 16, 16, 3)
    model = UNet2D(UNetConfig.tiny(), seed=SEED)
    model.apply_route(ROUTE)
    train_base(model, np.ascontiguousarray(pixel_unshuffle(faces)), base_steps)
    reference, optimizer = model.flat.data.copy(), AdamW(model.flat.data, lr=1e-4)
    test = range(1000, 1064)
    before = float(reward(draw(model, test, 10, "bf16")).mean())
    for round_ in range(rounds):
        chosen, rejected = explore(model, round_, candidates=128, keep=64)
        for i in range(4):
            loss, accuracy = dpo_step(model, reference, optimizer, chosen, rejected, 4 * round_ + i)
        print(f"align  round {round_ + 1}  loss {loss:.3f}  accuracy {accuracy:.2f}  reward of the chosen "
              f"{reward(chosen).mean():+.3f}, of the rejected {reward(rejected).mean():+.3f}")  # fmt: skip
    after = float(reward(draw(model, test, 10, "bf16")).mean())
    print(f"reward of 64 pictures from the same noise: {before:+.3f} before, {after:+.3f} after")
    return before, after


if __name__ == "__main__":
    main()
