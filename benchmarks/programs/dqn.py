"""Balance a pole with deep Q-learning: Flax Linen, a loop of one's own, one update after each step of the environment.

The loop stays as it is. The Learner takes the place of the jitted update and of the state that it trains.
"""

import math
import random

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import fluxcb
from fluxcb import Read, Write, every
from fluxcb.callbacks import RunFunction
from fluxcb.events import BackwardBegin, BackwardEnd
from fluxcb.phases import AbstractTrainingPhase

EPOCHS, STEPS = 6, 500
BATCH, CAPACITY, GAMMA, TARGET_EVERY = 64, 10_000, 0.99, 250
LEARNING_RATE = 1e-3


class QNetwork(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(120)(x))
        x = nn.relu(nn.Dense(84)(x))
        return nn.Dense(2)(x)


class CartPole:
    """A pole on a cart that is pushed to the left or to the right (Barto, Sutton and Anderson, 1983)."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def reset(self):
        self.state = [self.random.uniform(-0.05, 0.05) for _ in range(4)]
        self.steps = 0
        return np.array(self.state, np.float32)

    def step(self, action):
        x, speed, angle, turning = self.state
        force = 10.0 if action == 1 else -10.0
        sin, cos = math.sin(angle), math.cos(angle)
        push = (force + 0.05 * turning**2 * sin) / 1.1
        angular = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        linear = push - 0.05 * angular * cos / 1.1
        self.state = [x + 0.02 * speed, speed + 0.02 * linear, angle + 0.02 * turning, turning + 0.02 * angular]
        self.steps += 1
        fallen = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.21
        return np.array(self.state, np.float32), 1.0, fallen, fallen or self.steps == 500


class ReplayBuffer:
    def __init__(self, seed):
        self.observations, self.next_observations = np.zeros((2, CAPACITY, 4), np.float32)
        self.actions, self.rewards, self.dones = (np.zeros(CAPACITY, dtype) for dtype in (np.int32, np.float32, bool))
        self.random, self.added = np.random.default_rng(seed), 0

    def add(self, observation, action, reward, next_observation, done):
        at = self.added % CAPACITY
        self.observations[at], self.actions[at], self.rewards[at] = observation, action, reward
        self.next_observations[at], self.dones[at] = next_observation, done
        self.added += 1

    def sample(self):
        at = self.random.integers(min(self.added, CAPACITY), size=BATCH)
        return {
            "observations": self.observations[at],
            "actions": self.actions[at],
            "rewards": self.rewards[at],
            "next_observations": self.next_observations[at],
            "dones": self.dones[at],
        }


def td_loss(network, params, target_params, batch):
    values = network.apply(target_params, batch["next_observations"]).max(axis=-1)
    targets = batch["rewards"] + GAMMA * jnp.where(batch["dones"], 0.0, values)
    predicted = network.apply(params, batch["observations"])[jnp.arange(BATCH), batch["actions"]]
    return jnp.mean((predicted - targets) ** 2)


def epsilon(step):
    return max(0.05, 1 - step / (0.5 * EPOCHS * STEPS))


def by_hand(tick):
    network, environment, replay, rng = QNetwork(), CartPole(0), ReplayBuffer(0), random.Random(0)
    q_values = jax.jit(network.apply)
    params = network.init(jax.random.key(0), np.zeros(4, np.float32))
    target_params = params
    state = TrainState.create(apply_fn=network.apply, params=params, tx=optax.adam(LEARNING_RATE))

    @jax.jit
    def update(state, target_params, batch):
        loss, grads = jax.value_and_grad(lambda params: td_loss(network, params, target_params, batch))(state.params)
        return state.apply_gradients(grads=grads), loss

    observation, lengths = environment.reset(), []
    for step in range(EPOCHS * STEPS):
        if rng.random() < epsilon(step):
            action = rng.randrange(2)
        else:
            action = int(np.argmax(q_values(state.params, observation)))
        next_observation, reward, done, over = environment.step(action)
        replay.add(observation, action, reward, next_observation, done)
        if over:
            lengths.append(environment.steps)
        observation = environment.reset() if over else next_observation
        state, loss = update(state, target_params, replay.sample())
        if (step + 1) % TARGET_EVERY == 0:
            target_params = state.params
        if (step + 1) % STEPS == 0:
            print(f"step {step + 1} loss {float(loss):.4f} episode length {np.mean(lengths[-10:]):.1f}")
            tick()
    return {
        "loss": float(loss),
        "episodes": float(len(lengths)),
        "length": float(np.mean(lengths[-10:])),
        "params": float(optax.tree.norm(state.params)),
    }


def with_fluxcb(tick):
    network, environment, replay, rng = QNetwork(), CartPole(0), ReplayBuffer(0), random.Random(0)
    q_values = jax.jit(network.apply)

    class TemporalDifference(AbstractTrainingPhase):
        provides = {BackwardBegin: ("loss",), BackwardEnd: ("grads",)}
        uses = ("cbstate.target",)

        def step(self, learner, emit):
            def loss(params):
                learner.step.loss = td_loss(network, params, learner.cbstate.target, learner.step.batch)
                emit(BackwardBegin())
                return learner.step.loss

            learner.step.grads = learner.grad(loss, wrt="params")
            emit(BackwardEnd())
            learner.apply_updates()

    def update_target(learner):
        learner.cbstate.target = learner.params

    access = {"params": Read(), "cbstate": {"target": Write()}}
    phase = TemporalDifference()
    learner = fluxcb.Learner.from_loss(
        network.init(jax.random.key(0), np.zeros(4, np.float32)),
        None,
        optax.adam(LEARNING_RATE),
        phases=(phase,),
        callbacks=[every(RunFunction(update_target, init=update_target, access=access), steps=TARGET_EVERY)],
        default_callbacks=False,
    )
    observation, lengths = environment.reset(), []
    for step in range(EPOCHS * STEPS):
        if rng.random() < epsilon(step):
            action = rng.randrange(2)
        else:
            action = int(np.argmax(q_values(learner.borrow("params"), observation)))
        next_observation, reward, done, over = environment.step(action)
        replay.add(observation, action, reward, next_observation, done)
        if over:
            lengths.append(environment.steps)
        observation = environment.reset() if over else next_observation
        values = learner.run_step(phase, replay.sample())
        if (step + 1) % STEPS == 0:
            print(f"step {step + 1} loss {float(values['loss']):.4f} episode length {np.mean(lengths[-10:]):.1f}")
            tick()
    return {
        "loss": float(values["loss"]),
        "episodes": float(len(lengths)),
        "length": float(np.mean(lengths[-10:])),
        "params": float(optax.tree.norm(learner.params)),
    }
