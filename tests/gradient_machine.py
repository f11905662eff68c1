"""Scripts that hypothesis writes: what may be done to gradients, in any order.

`tests/gradient_oracle.py` says what every gradient, verdict and loss scale must be after each action,
and the twin of an optimizer what a step must make of it. Gradients are small integers and scales are
powers of two, so sums are equal to the last bit. A step is compared within the rounding of what is
stepped, from the values that the step before has left; at O0 it is equal in every bit to the step of
an optimizer without amp.

Weights are written in all ways that scripts have, and are what was written from then on, whoever looks.
"""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import amp
from amp.errors import AmpRuntimeError
from amp.torch_versions import HAS_GRAD_DTYPE
from amp.training import gradients
from amp.training.attached_optimizer import AttachedOptimizer
from tests import gradient_oracle as oracle
from tests.gradient_harness import LATE, TWIN_OF, Model, Stage, compare, state_of, wide
from tests.states import assert_same

LARGEST = 40
"""No gradients are made beyond: every format holds what comes of these exactly."""


class Planned(Exception):  # noqa: N818
    """What is raised where a script may fail."""


def fail(*_: object) -> None:
    """Raise `Planned`."""
    raise Planned


class Write(NamedTuple):
    """A number that is written to some elements of one parameter.

    Attributes:
        which: the number of the parameter in its optimizer.
        route: what is written to: one of `ROUTES`.
        number: what is written; every format holds it. Masters get some more.
        everywhere: whether to all elements, and not to the first half.
    """

    which: int
    route: str
    number: float
    everywhere: bool


class BlockPlan(NamedTuple):
    """What one block does.

    Attributes:
        which: the optimizers.
        numbers: how large the gradient of each parameter is; the loss does not reach those with None.
        loss_id: of its loss.
        delay: whether with `delay_unscale`.
        waits: whether with `delay_overflow_check`: the scale does not move.
        bad: what one element of a gradient is instead, where gradients are checked.
        inside: what is done after backward, before the block is left.
        fails: where an exception is raised.
        write: what is written, if that is done inside.
    """

    which: Sequence[int]
    numbers: Mapping[str, float | None]
    loss_id: int
    delay: bool = False
    waits: bool = False
    bad: float | None = None
    inside: str | None = None
    fails: str | None = None
    write: Write = Write(0, "p.data", 1.0, everywhere=True)


WHICH = st.sampled_from([0, 1])
NUMBERS = st.fixed_dictionaries(
    {name: st.sampled_from([1.0, 2.0, -1.0, -2.0, None]) for name in Model.BASES}
)
ROUTES = {
    "p.data": lambda p, stepped, entry: p.data,
    "p": lambda p, stepped, entry: p.detach(),
    "master.data": lambda p, stepped, entry: stepped.data,
    "master": lambda p, stepped, entry: stepped.detach(),
    "entry.data": lambda p, stepped, entry: entry().data,
    "entry": lambda p, stepped, entry: entry(),
}
"""What a script writes to, of a parameter, what the optimizer steps, and the state dict's entry."""
ASSIGNED = "p.data = FP32"
NUMBERS_TO_WRITE = st.sampled_from([0.75, -1.5, 1.0, 0.0])
WRITES = st.builds(
    Write,
    which=st.integers(0, 2),
    route=st.sampled_from(list(ROUTES)),
    number=NUMBERS_TO_WRITE,
    everywhere=st.booleans(),
)
LOOKS = ("nothing", "a forward", "a state dict", "a copy", "a block", "a step")
"""What is done after a write, before anything else looks at the weights."""
INSIDE = (
    "look",
    "zero_grad to None",
    "zero_grad to zeros",
    "zero_grad of the model",
    "block of another optimizer",
    "block of another optimizer and loss",
    "nested block",
    "step",
    "write",
)
BLOCKS = st.builds(
    BlockPlan,
    which=st.sampled_from([[0], [1], [0, 1]]),
    numbers=NUMBERS,
    loss_id=WHICH,
    delay=st.booleans(),
    waits=st.sampled_from([False, False, True]),
    bad=st.sampled_from([None, None, None, math.inf, -math.inf, math.nan]),
    inside=st.sampled_from([*[None] * len(INSIDE), *INSIDE]),
    fails=st.none(),
    write=WRITES,
)
FAILURES = st.sampled_from(["before backward", "within backward", "after backward", "leaving"])


class Actions(Stage):
    """What the rules below are made of."""

    # Blocks.

    def given(self, which: Sequence[int], numbers: Mapping[str, float | None]) -> dict[str, Tensor]:
        """Return inputs for the model: gradients of these optimizers' parameters that train."""
        parts = [p for o in self.expected for g in o.gradients.values() for p in g.parts]
        if any(part.nan_to_num(0, 0, 0).abs().max() > LARGEST for part in parts):
            return {}
        return {
            name: number * Model.BASES[name]
            for i in which
            for name in self.expected[i].gradients
            if name not in self.frozen and (number := numbers[name]) is not None
        }

    def run_block(self, plan: BlockPlan) -> None:
        """Run a block, unless its loss would reach nothing."""
        given = self.given(plan.which, plan.numbers)
        if not given:
            return
        scale = self.scales[plan.loss_id]
        if plan.bad is not None and scale.config.check:
            name = next(iter(given))
            given[name] = given[name].clone()
            given[name][..., -1] = plan.bad
        expected = oracle.Block(scale, [self.expected[i] for i in plan.which])
        optimizers: Any = [self.optimizers[i] for i in plan.which]
        attached = map(AttachedOptimizer.of, optimizers)
        if plan.fails == "leaving" and all(each is not None and each.is_plain for each in attached):
            plan = plan._replace(fails=None)  # nothing is done then that could fail
        options = {"delay_unscale": plan.delay, "delay_overflow_check": plan.waits}
        loss = self.model(given)
        try:
            with (
                pytest.MonkeyPatch.context() as patch,
                warnings.catch_warnings(),
                amp.scale_loss(
                    loss,
                    optimizers if len(optimizers) > 1 else optimizers[0],
                    loss_id=plan.loss_id,
                    **options,
                ) as scaled_loss,
            ):
                compare(scaled_loss, wide(loss) * scale.value, "the scaled loss")
                self.run_backward(scaled_loss, given, expected, plan.fails)
                self.states_and_verdicts_are_those_of_the_table()
                self.models_have_the_gradients_that_backward_left()
                self.act_inside(plan)
                if plan.inside in ("zero_grad to None", "zero_grad of the model"):
                    # So the block has lost its gradients.
                    warnings.filterwarnings("ignore", "an amp.scale_loss block has ended, and no")
                if plan.fails == "after backward":
                    raise Planned
                if plan.fails == "leaving":
                    patch.setattr(gradients.NewGradients, "of", fail)  # as what cannot be unscaled does
        except Planned:
            assert plan.fails is not None
            expected.abort()
            return
        assert plan.fails is None
        if plan.delay and not scale.is_one:
            expected.delay()
        else:
            expected.leave(update=not plan.waits)

    def may_step_inside(self, plan: BlockPlan) -> bool:
        scale = self.scales[plan.loss_id]
        return scale.is_one and scale.config.check is not True

    def run_backward(
        self,
        scaled_loss: Tensor,
        given: Mapping[str, Tensor],
        expected: oracle.Block,
        fails: str | None,
    ) -> None:
        """Run the backward of a block, or a part of it."""
        if fails == "before backward":
            raise Planned
        if fails == "within backward":
            name, gradient = next(iter(given.items()))
            torch.autograd.backward(scaled_loss, inputs=[self.named[name]], retain_graph=True)
            expected.backward(name, gradient)
            scaled_loss.register_hook(fail)
        scaled_loss.backward()
        for name, gradient in given.items():
            expected.backward(name, gradient)

    def act_inside(self, plan: BlockPlan) -> None:
        """Do in a block what is allowed there, or what is refused and changes nothing."""
        i = plan.which[-1]
        if plan.inside == "look":
            self.look_at(i)
        elif plan.inside == "write":
            self.write(i, plan.write)
        elif plan.inside in ("zero_grad to None", "zero_grad to zeros"):
            self.zero_grad(i, set_to_none=plan.inside.endswith("None"))
        elif plan.inside == "zero_grad of the model":
            self.zero_grad_of_model()
        elif plan.inside in ("block of another optimizer", "block of another optimizer and loss"):
            if len(plan.which) > 1:
                return
            loss_id = 1 - plan.loss_id if plan.inside.endswith("loss") else plan.loss_id
            self.run_block(plan._replace(which=[1 - i], loss_id=loss_id, inside=None, fails=None))
        elif plan.inside == "nested block":
            with (
                pytest.raises(AmpRuntimeError, match="inside another amp.scale_loss block"),
                amp.scale_loss(torch.ones(()), self.optimizers, loss_id=1 - plan.loss_id),
            ):
                pass
        elif plan.inside == "step" and self.may_step_inside(plan):
            pass  # tests/test_mistakes.py does
        elif plan.inside == "step":
            with pytest.raises(AmpRuntimeError, match="inside the amp.scale_loss block"):
                self.optimizers[i].step()

    # Writes to weights.

    def write(self, i: int, write: Write) -> None:
        """Write to a parameter or to its master, and to the twin."""
        self.written(i, write)()

    def written(self, i: int, write: Write) -> Callable[[], None]:
        """Write to a parameter or to its master, and return what does the same to the twin."""
        names = list(self.expected[i].gradients)
        index = write.which % len(names)
        name = names[index]
        parameter, is_whole = self.named[name], self.has_whole_master(i, name)
        route = write.route
        if not is_whole and "p" not in route and parameter.dtype is not torch.float32:
            route = "p.data"  # there is nothing else, or it has no values
        stepped = [p for group in self.optimizers[i].param_groups for p in group["params"]][index]
        before = parameter.detach().clone()
        target = ROUTES[route](parameter, stepped, lambda: self.model.state_dict()[name])
        number = write.number + (2.0**-13 if target.dtype is torch.float32 else 0.0)
        chosen = slice(None) if write.everywhere else slice(0, 1)
        target[chosen] = number
        is_written = torch.zeros(parameter.shape, dtype=torch.bool)
        is_written[chosen] = True
        if target.dtype is not torch.float32:  # where nothing changes, low bits stay
            is_written &= parameter.detach() != before
        self.is_blurred[i] |= self.lean is not None and self.expected[i].gradients[name].has_master
        copied = self.twins[i].copies[index]
        return lambda: copied.data.masked_fill_(is_written, number)  # type: ignore[return-value]

    def has_whole_master(self, i: int, name: str) -> bool:
        return self.lean is None and self.expected[i].gradients[name].has_master

    def assign(self, i: int, write: Write) -> None:
        """Give a parameter FP32 values in other memory, none of which 16 bits hold."""
        names = list(self.expected[i].gradients)
        index = write.which % len(names)
        name = names[index]
        parameter, gradient = self.named[name], self.expected[i].gradients[name]
        if not (gradient.has_master or parameter.dtype is torch.float32):
            return  # at O3 it would be another model
        values = torch.full(parameter.shape, write.number + 2.0**-13)
        parameter.data = values
        self.twins[i].copies[index].data.copy_(values)
        self.is_blurred[i] |= self.lean is not None and gradient.has_master

    def look_after_write(self, i: int, look: str, plan: BlockPlan) -> None:
        """Be the first to look at weights that were written."""
        if look == "a forward":
            self.model({"shift": torch.zeros(2)})
        elif look == "a block":
            self.run_block(plan._replace(which=[i]))
        elif look == "a step":
            self.step_once(i)
        elif look in ("a state dict", "a copy"):
            has = self.model.state_dict if look == "a state dict" else self.parameters_of_a_copy
            names = self.expected[i].gradients
            for name, copied in zip(names, self.twins[i].copies, strict=True):
                compare(has()[name], copied, f"{look} of {name}", self.blur(i, name))

    def parameters_of_a_copy(self) -> dict[str, Tensor]:
        return dict(copy.deepcopy(self.model).named_parameters())

    # What looks at gradients or clears them.

    def look_at(self, i: int) -> dict[str, Any]:
        """Compare the `.grad` that shows a total with the oracle's; return what has it, by name."""
        expected = self.expected[i]
        stepped = self.stepped(i)
        is_scaled = expected.open or expected.delayed
        names = [name for name, g in expected.gradients.items() if g.has_master or not is_scaled]
        for name in names:
            total = expected.gradients[name].total
            compare(stepped[name].grad, total, f"the gradient of {name}", self.tolerance(i))
            expected.is_held = None if expected.gradients[name].has_master else expected.is_held
        return {name: stepped[name] for name in names}

    def holders(self, i: int, of_model: bool) -> dict[str, Any]:
        """Return what a script finds the gradients at, by name: masters, or the model's parameters."""
        is_one = HAS_GRAD_DTYPE and not (self.expected[i].open or self.expected[i].delayed)
        stepped = self.stepped(i)
        return {name: self.named[name] for name in stepped} if of_model and is_one else stepped

    def zero_grad(self, i: int, set_to_none: bool) -> None:
        self.optimizers[i].zero_grad(set_to_none=set_to_none)
        self.expected[i].zero_grad(set_to_none)
        self.is_inexact[i] = False

    # Steps.

    def zero_grad_of_model(self) -> None:
        self.model.zero_grad()
        for expected in self.expected:
            expected.zero_grad_of_model()

    def ahead(self, i: int) -> oracle.Optimizer:
        """Return what a step of an optimizer finds, and leave what is expected as it is."""
        expected = copy.deepcopy(self.expected)[i]
        expected.finish_delayed()
        return expected

    def can_step(self, i: int) -> bool:
        """Whether a step is one that a sane script takes: with finite gradients, or an overflow."""
        ahead = self.ahead(i)
        return ahead.is_finite or ahead.must_skip

    def step_once(self, i: int) -> None:
        """Step if that is sane, and compare with the twin."""
        if not self.can_step(i):
            return
        expected = self.expected[i]
        expected.finish_delayed()
        if expected.must_skip:
            before = self.snapshot(i)
            self.optimizers[i].step()
            assert_same(self.snapshot(i), before)
        else:
            self.optimizers[i].step()
            self.compare_with_twin(i)
        self.note_step(i)

    def note_step(self, i: int) -> None:
        """Expect that the gradients are used. A forward follows every other step at once."""
        self.expected[i].stepped()
        self.steps_taken += 1
        if self.steps_taken % 2:
            self.model({"shift": torch.zeros(2)})

    def snapshot(self, i: int) -> dict[str, Tensor]:
        """Return copies of what an optimizer steps, and of its state."""
        snapshot = {}
        stepped_of = self.stepped(i)
        for name, value in self.values(i).items():
            stepped = stepped_of[name]
            snapshot[name] = value.clone()
            for key, value in state_of(self.optimizers[i], stepped).items():
                snapshot[f"{key} of {name}"] = value
        return snapshot

    def compare_with_twin(self, i: int, then: Callable[[], None] = lambda: None) -> None:
        """Let the twin step with the oracle's gradients, and compare, within what rounding does.

        Args:
            i: the number of the optimizer.
            then: does to the twin what was done to the optimizer's weights after the step.
        """
        twin, optimizer = self.twins[i], self.optimizers[i]
        twin.step([gradient.total for gradient in self.expected[i].gradients.values()])
        then()
        is_same = self.level == "O0" and self.kinds[i] not in TWIN_OF and not self.is_inexact[i]
        stepped_of, values = self.stepped(i), self.values(i)
        for (name, stepped), copied in zip(stepped_of.items(), twin.copies, strict=True):
            tolerance = 0.0 if is_same else self.tolerance_of_steps(i, name)
            compare(values[name], copied, name, tolerance)
            state, expected = state_of(optimizer, stepped), state_of(twin.optimizer, copied)
            assert state.keys() == expected.keys(), name
            for key in state:
                compare(state[key], expected[key], f"{key} of {name}", tolerance)
        self.follow(i)
        self.is_blurred[i] = False

    def tolerance_of_steps(self, i: int, name: str) -> float:
        """Return how far what a step has made may be from what the twin has."""
        if self.lean is None or not self.expected[i].gradients[name].has_master:
            return 8 * torch.finfo(self.values(i)[name].dtype).eps
        rounding = {"split16": 2.0**-20, "split24": 2.0**-12, "kahan": 2.0**-12}[self.lean]
        return max(rounding, self.blur(i, name))


class Script(Actions):
    """All that a script does."""

    @rule(plans=st.lists(BLOCKS, min_size=1, max_size=8), one_loss=st.booleans())
    def blocks(self, plans: list[BlockPlan], one_loss: bool) -> None:
        for plan in plans:
            self.run_block(plan._replace(loss_id=plans[0].loss_id) if one_loss else plan)
            self.states_and_verdicts_are_those_of_the_table()
            self.models_have_the_gradients_that_backward_left()

    @rule(
        before=st.lists(BLOCKS, max_size=2),
        plan=BLOCKS,
        inside=st.sampled_from([None, *INSIDE]),
        fails=FAILURES,
    )
    def failing_block(
        self, before: list[BlockPlan], plan: BlockPlan, inside: str | None, fails: str
    ) -> None:
        for each in before:
            self.run_block(each)
        self.run_block(plan._replace(inside=inside, fails=fails))

    @rule(
        plans=st.lists(BLOCKS, min_size=1, max_size=3),
        clear=st.sampled_from(["first", "last", "never"]),
        set_to_none=st.booleans(),
    )
    def iteration(self, plans: list[BlockPlan], clear: str, set_to_none: bool) -> None:
        """Run what most scripts do over and over: some blocks, and a step of each optimizer."""
        which = plans[0].which
        for i in which if clear == "first" else ():
            self.zero_grad(i, set_to_none)
        for plan in plans:
            self.run_block(plan._replace(which=which))
        for i in which:
            self.step_once(i)
            if clear == "last":
                self.zero_grad(i, set_to_none)

    @rule(i=WHICH, numbers=NUMBERS)
    def stray_backward(self, i: int, numbers: Mapping[str, float | None]) -> None:
        """Call backward outside of any block."""
        if self.expected[i].delayed is not None or not (given := self.given([i], numbers)):
            return
        self.model(given).backward()
        for name, gradient in given.items():
            self.expected[i].add(name, gradient)

    @rule(i=WHICH)
    def look(self, i: int) -> None:
        self.look_at(i)

    @rule(
        i=WHICH,
        factor=st.sampled_from([-1.0, 0.5, 2.0]),
        in_place=st.booleans(),
        of_model=st.booleans(),
        steps=st.booleans(),
    )
    def scale_gradients(
        self, i: int, factor: float, in_place: bool, of_model: bool, steps: bool
    ) -> None:
        """Multiply gradients, in place or by others in their place, and perhaps step at once."""
        parts = [p for g in self.expected[i].gradients.values() for p in g.parts]
        if any(not torch.equal(p.half() * factor, p * factor) for p in parts if p.isfinite().all()):
            return  # float16 would round it
        names, holders = list(self.look_at(i)), self.holders(i, of_model)
        for name in names:
            holder = holders[name]
            if holder.grad is not None and in_place:
                holder.grad.mul_(factor)
            elif holder.grad is not None:
                holder.grad = holder.grad * factor
            self.expected[i].gradients[name].change(lambda total: total * factor)
        if steps:
            self.step_once(i)

    @rule(i=WHICH, how=st.sampled_from(["in place", "through .data", "by others"]))
    def repair_gradients(self, i: int, how: str) -> None:
        """Put zeros in the place of inf and NaN: a step is not skipped for them any more."""
        for name, stepped in self.look_at(i).items():
            if stepped.grad is not None and how == "by others":
                stepped.grad = stepped.grad.nan_to_num(0.0, 0.0, 0.0)
            elif stepped.grad is not None:
                grad = stepped.grad if how == "in place" else stepped.grad.data
                grad.nan_to_num_(0.0, 0.0, 0.0)
            self.expected[i].gradients[name].change(lambda total: total.nan_to_num(0.0, 0.0, 0.0))

    @rule(i=WHICH, number=st.integers(0, 2), of_model=st.booleans(), steps=st.booleans())
    def drop_one(self, i: int, number: int, of_model: bool, steps: bool) -> None:
        """Delete the gradient of one parameter, unseen, and perhaps step at once."""
        expected = self.expected[i]
        name = list(expected.gradients)[number % len(expected.gradients)]
        gradient = expected.gradients[name]
        if gradient.has_master:
            expected.is_held = None
        elif expected.delayed is not None:
            return
        self.holders(i, of_model)[name].grad = None
        gradient.total = None
        if steps:
            self.step_once(i)
        list(amp.master_params(self.optimizers[i]))  # lets the model's parameter follow

    @rule(i=WHICH, by_norm=st.booleans())
    def clip(self, i: int, by_norm: bool) -> None:
        """Clip with torch's functions, by value or by the norm of all."""
        expected = self.expected[i]
        if not expected.is_finite:
            return
        session = amp.get_session()
        is_patched = not session.scalers[0].config.is_identity
        sharing = [x for x in self.expected if x.gradients.keys() & expected.gradients.keys()]
        if not is_patched and any(gradients.State.DELAYED in other.states for other in sharing):
            return  # torch's function finishes no block
        clip_grad_norm_(amp.master_params(self.optimizers[i]), math.inf)
        for other in sharing:
            other.finish_delayed()
        totals = [g.total for g in expected.gradients.values() if g.total is not None]
        if not totals:
            return
        stepped = self.look_at(i)
        if by_norm:
            norm = clip_grad_norm_(amp.master_params(self.optimizers[i]), 3.0)
            expected_norm = math.sqrt(sum(float(total.square().sum()) for total in totals))
            assert math.isclose(float(norm), expected_norm, rel_tol=2e-3)
            self.is_inexact[i] = True
        else:
            clip_grad_value_(amp.master_params(self.optimizers[i]), 2.0)
        for name, parameter in stepped.items():
            expected.gradients[name].change(
                lambda total, p=parameter: wide(p.grad) if by_norm else total.clamp(-2, 2)
            )

    @rule(i=WHICH, set_to_none=st.booleans())
    def clear(self, i: int, set_to_none: bool) -> None:
        self.zero_grad(i, set_to_none)

    @rule()
    def clear_model(self) -> None:
        """Call `model.zero_grad()`."""
        self.zero_grad_of_model()

    @rule(i=WHICH, number=st.integers(0, 2))
    def freeze_or_thaw(self, i: int, number: int) -> None:
        names = list(self.expected[i].gradients)
        name = names[number % len(names)]
        self.frozen ^= {name}
        self.named[name].requires_grad_(name not in self.frozen)

    @precondition(lambda self: not all(self.has_late))
    @rule(i=WHICH)
    def add_group(self, i: int) -> None:
        if self.has_late[i]:
            return
        self.has_late[i] = True
        self.optimizers[i].add_param_group({"params": [self.named[LATE[i]]]})
        self.expect_parameter(i, LATE[i])
        self.follow(i)
        if self.expected[i].is_held:
            self.expected[i].is_held = None  # until the next block or step looks at the groups

    @rule(i=WHICH, write=WRITES, look=st.sampled_from(LOOKS), plan=BLOCKS)
    def write_weights(self, i: int, write: Write, look: str, plan: BlockPlan) -> None:
        """Write to a parameter, to its master, or to its entry in a state dict."""
        self.write(i, write)
        self.look_after_write(i, look, plan)

    @rule(i=WHICH, write=WRITES, look=st.sampled_from(LOOKS), plan=BLOCKS)
    def assign_weights(self, i: int, write: Write, look: str, plan: BlockPlan) -> None:
        """Give a parameter FP32 values by `.data =`, as `vector_to_parameters` does."""
        if self.expected[i].delayed is None:
            self.assign(i, write)
            self.look_after_write(i, look, plan)

    @rule(i=WHICH, write=WRITES, after=st.booleans())
    def step_with_a_hook_that_writes(self, i: int, write: Write, after: bool) -> None:
        """Step, with a write in a hook before it or after it."""
        expected = self.expected[i]
        if not self.ahead(i).is_finite or self.ahead(i).must_skip:
            return
        if self.lean is not None and len(self.optimizers[i].param_groups) > 1:
            return  # torch's step, and so its hooks, run once for each group
        expected.finish_delayed()
        if expected.must_skip:
            return
        optimizer, writes = self.optimizers[i], list[Callable[[], None]]()
        if after:
            hook = optimizer.register_step_post_hook(lambda *_: writes.append(self.written(i, write)))
        else:
            hook = optimizer.register_step_pre_hook(lambda *_: self.write(i, write))
        optimizer.step()
        hook.remove()
        self.compare_with_twin(i, *writes)
        self.note_step(i)

    @rule(i=WHICH, times=st.integers(1, 2))
    def step(self, i: int, times: int) -> None:
        for _ in range(times):
            self.step_once(i)

    @rule(i=WHICH)
    def failing_step(self, i: int) -> None:
        """Raise in a hook inside the step: it is still to be taken."""
        expected = self.expected[i]
        if not self.can_step(i) or (self.ahead(i).must_skip and not expected.holds):
            return  # the host skips it before the hook is called
        expected.finish_delayed()
        before = self.snapshot(i)
        handle = self.optimizers[i].register_step_pre_hook(fail)
        with pytest.raises(Planned):
            self.optimizers[i].step()
        handle.remove()
        assert_same(self.snapshot(i), before)

    @rule(i=WHICH, plan=BLOCKS, raises=st.sampled_from([False, False, True]))
    def step_with_closure(self, i: int, plan: BlockPlan, raises: bool) -> None:
        """Step with a closure, which is evaluated again after an overflow."""
        expected = self.expected[i]
        plans = [plan._replace(which=[i])]

        def closure() -> float:
            expected.finish_delayed()
            assert len(plans) == 1 or expected.must_skip
            if len(plans) > 1:
                expected.verdicts = []  # which the step has used for the last evaluation
            self.zero_grad(i, set_to_none=True)
            self.run_block(plans[-1])
            plans.append(plans[-1]._replace(bad=None, waits=False))
            if raises:
                raise Planned
            return 0.0

        self.zero_grad(i, set_to_none=True)
        if not self.given([i], plan.numbers):
            return
        if raises:
            with pytest.raises(Planned):
                self.optimizers[i].step(closure)
            return
        self.optimizers[i].step(closure)
        expected.finish_delayed()
        assert not expected.must_skip
        expected.verdicts = []
        self.compare_with_twin(i)
        self.note_step(i)

    @precondition(lambda self: not self.was_saved)  # to initialize again takes long
    @rule()
    def save_and_load(self) -> None:
        """Go on in new objects, as the script does that is started again from a checkpoint."""
        self.was_saved = True
        before = [self.snapshot(i) for i in (0, 1)]
        file = io.BytesIO()
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.save([self.model.state_dict(), states, amp.state_dict()], file)
        amp.get_session().close()
        self.make(seed=1)
        model, states, state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        self.model.load_state_dict(model)
        for optimizer, saved in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(saved)
        amp.get_session().load_state_dict(state)
        for i, expected in enumerate(self.expected):
            expected.zero_grad(set_to_none=True)
            expected.verdicts = []
            self.is_inexact[i] = False
            self.follow(i)
            assert_same(self.snapshot(i), before[i])
        for scale in self.scales:
            scale.found_inf = False
