"""What the controller sees, holds and says; its law is in test_descent.py."""

import copy
import inspect
import json
import logging
import math
import re

import numpy as np
import pytest
import torch

from sparse_losses import (
    CollapseError,
    FlopsLoss,
    IdfFlopsLoss,
    InfoNCELoss,
    ObjectiveOutput,
    SparsityController,
    SpladeBatch,
    SpladeObjective,
    Texts,
)
from sparse_losses.objective.controller import REMEDIES, _chance  # a warning alone shows it
from sparse_losses.objective.descent import Descent

V = 1000


def _rows(active, dead=0, rows=10):
    """``rows`` texts with so many active dimensions, ``dead`` of them silent."""
    x = torch.zeros(rows, V)
    x[: rows - dead, :active] = 1.0
    return x


def _controller(objective=None, **options):
    objective = objective or SpladeObjective({"document_flops": 0.01})
    return objective, SparsityController(objective, **{"target_active": 50} | options)


def _weight(objective):
    return objective.weights["document_flops"]


def _look(controller, activations, times=1):
    """Take so many steps with the same texts; return the status after them."""
    for _ in range(times):
        controller.observe(activations)
        controller.step()
    return controller.report()["status"]


def _optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])


def test_the_weight_is_0_until_the_count_is_settled_and_then_rises():
    objective, controller = _controller()
    weights = []
    for _ in range(8):
        _look(controller, _rows(900))
        weights.append(_weight(objective))
    assert weights[:4] == [0.0] * 4
    assert 0.01 <= weights[4] < weights[5] < weights[6] < weights[7]
    assert controller.report() == {
        "step": 8,
        "target": 50,
        "active": pytest.approx(900),
        "longest_list": None,
        "dead_rows": 0.0,
        "weight": weights[-1],
        "mean_activation": 1.0,
        "status": "sparsifying",
    }


@pytest.mark.parametrize("flops", [FlopsLoss(), IdfFlopsLoss(torch.full((V,), 3.0), beta=1.0)])
@pytest.mark.parametrize("term", ["document_flops", "query_flops"])
def test_flops_starts_as_a_share_of_the_ranking_terms(term, flops):
    """Whatever the weight was, and however large FLOPS is."""
    objective = SpladeObjective({"info_nce": 2.0, term: 1e6}, flops=flops)
    controller = SparsityController(objective, term, target_active=50, start=0.1)
    controller.attach(optimizer := _optimizer())
    g = torch.Generator().manual_seed(0)
    x = torch.rand(6, V, generator=g)
    batch = SpladeBatch(Texts(x), Texts(x.flip(0) + x))
    for _ in range(5):
        assert objective.weights[term] == 0.0
        value = objective(batch).terms["info_nce"].item()
        optimizer.step()
    assert value < 0.85 * math.log(6), "it learns"
    side = batch.anchor if term == "query_flops" else batch.positive
    first = 0.1 * 2.0 * value / flops(side.activations).item()
    assert objective.weights[term] == pytest.approx(first, rel=0.2)  # after the first change
    objective(batch)
    optimizer.step()
    assert objective.weights[term] > first


def test_flops_of_an_easy_task_starts_as_if_its_ranking_loss_were_a_twentieth():
    objective = SpladeObjective({"info_nce": 1.0})
    controller = SparsityController(objective, target_active=2)
    controller.attach(optimizer := _optimizer())
    batch = SpladeBatch(Texts(torch.eye(8)), Texts(torch.eye(8) + 1e-3))
    for _ in range(5):
        objective(batch)
        optimizer.step()
    flops = FlopsLoss()(batch.positive.activations).item()
    assert _weight(objective) == pytest.approx(0.03 * 0.05 / flops, rel=0.2)


def test_a_closing_gate_is_reported_as_shrinking_activations():
    """The only parameter is a scale, so all dimensions stay."""
    torch.manual_seed(0)
    table, log_gate = torch.rand(8, 200), torch.nn.Parameter(torch.zeros(()))
    objective = SpladeObjective({"document_flops": 0.1})
    controller = SparsityController(objective, target_active=20)
    optimizer = torch.optim.Adam([log_gate], lr=0.05)
    controller.attach(optimizer)
    statuses = []
    for _ in range(150):
        texts = Texts(log_gate.exp() * table)
        total, _ = objective(SpladeBatch(texts, texts))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        statuses.append(controller.report()["status"])
    assert log_gate.item() < math.log(0.1)
    assert statuses[10] == "sparsifying"
    assert statuses[-1] == "unreachable: activations shrink but stay active"
    assert controller.report()["mean_activation"] < 0.05


def test_flops_does_not_dominate_where_it_cannot_act():
    objective = SpladeObjective({"info_nce": 0.5, "document_flops": 0.01})
    controller = SparsityController(objective, target_active=20, steps=60)
    controller.attach(optimizer := _optimizer())
    texts = Texts(0.1 * _rows(400) + 3 * torch.eye(10, V))  # the ranking loss is below chance
    for _ in range(60):
        _, terms = objective(SpladeBatch(texts, texts))
        optimizer.step()
    flops = terms["document_flops"]
    most = 4 * max(0.5 * terms["info_nce"].item(), 0.5)
    assert objective.weights["document_flops"] * flops.item() == pytest.approx(most, rel=1e-5)


def test_a_loop_that_shows_its_ranking_loss_has_the_weight_of_an_objective():
    """Whatever its first weight was."""
    objective = SpladeObjective({"info_nce": 1.0, "document_flops": 1.0})
    controllers = [
        SparsityController(objective, target_active=20, steps=60),
        SparsityController(weight=7.0, target_active=20, steps=60),
    ]
    controllers[0].attach(optimizer := _optimizer())
    g, weights = torch.Generator().manual_seed(0), []
    for _ in range(60):
        documents = 0.1 * _rows(400) + 3 * torch.eye(10, V) * torch.rand(10, 1, generator=g)
        _, terms = objective(SpladeBatch(Texts(documents), Texts(documents)))
        controllers[1].observe(documents, info_nce=terms["info_nce"])
        controllers[1].step()
        optimizer.step()
        weights.append((objective.weights["document_flops"], controllers[1].weight.item()))
    assert weights[-1][0] > 0
    for of_objective, of_loop in weights:
        assert of_loop == pytest.approx(of_objective, rel=1e-5)


@pytest.mark.parametrize(("share", "warns"), [(1.0, 1), (0.8, 0), (1.3, 0)])
def test_a_ranking_loss_at_chance_is_named_once_after_50_steps(share, warns, caplog):
    objective = SpladeObjective({"info_nce": 2.0, "document_flops": 0.01})
    controller = SparsityController(objective, target_active=50)
    controller.attach(optimizer := _optimizer())
    (hook,) = objective._forward_hooks.values()  # a batch whose loss is this exactly
    batch = SpladeBatch(Texts(_rows(400)), Texts(_rows(400)), Texts(_rows(400)))
    output = ObjectiveOutput(torch.tensor(0.0), {"info_nce": torch.tensor(share * math.log(20))})
    for step in range(1, 70):
        assert not [r for r in caplog.records if "chance" in r.message] or step > 50
        hook(objective, (batch,), {}, output)
        optimizer.step()
    told = [record for record in caplog.records if "InfoNCE is 100% of its" in record.message]
    assert len(told) == warns
    assert all(record.levelname == "WARNING" for record in told)


@pytest.mark.parametrize(("share", "warns"), [(1.0, 1), (0.8, 0)])
def test_a_loop_without_an_objective_tells_how_well_it_ranks(share, warns, caplog):
    """FLOPS stays off while nothing is learned."""
    controller = SparsityController(weight=0.5, target_active=50)
    for _ in range(51):
        controller.observe(_rows(400), info_nce=torch.tensor(share * math.log(10)))
        controller.observe(_rows(400), info_nce=torch.tensor(share * math.log(30)), candidates=30)
        controller.step()
    assert (controller.weight == 0) == bool(warns)
    assert len([r for r in caplog.records if "InfoNCE is 100% of its" in r.message]) == warns
    with pytest.raises(ValueError, match=r"`info_nce` of shape \[\], got \[2\]"):
        controller.observe(_rows(400), info_nce=torch.ones(2))
    with pytest.raises(ValueError, match="`candidates` to be an integer >= 2, got 1"):
        controller.observe(_rows(400), info_nce=torch.tensor(1.0), candidates=1)
    controller.observe(_rows(400)[:1], info_nce=torch.tensor(0.0))  # a last batch of one row
    with pytest.raises(TypeError, match="expected no `info_nce` beside an objective"):
        SparsityController(SpladeObjective({"document_flops": 0.01}), target_active=50).observe(
            _rows(400), info_nce=torch.tensor(1.0)
        )


@pytest.mark.parametrize(
    "options", [{}, {"negatives_from": ("document", "query", "positive")}, {"decoupled": True}]
)
def test_chance_is_the_logarithm_of_the_candidates(options):
    """Equal texts: all candidates score alike."""
    rows, own = Texts(_rows(400)), Texts(_rows(400).expand(10, 10, V).transpose(0, 1)[:, :3])
    for negative in (None, rows, own):
        objective = SpladeObjective({"info_nce": 1.0}, info_nce=InfoNCELoss(**options))
        batch = SpladeBatch(rows, rows, negative)
        value = objective(batch).terms["info_nce"].item()
        assert value == pytest.approx(_chance(objective, batch), rel=1e-5)  # of logits of 14
    some = torch.rand(10, 13, generator=torch.Generator().manual_seed(0)) < 0.5
    some |= torch.eye(10, 13).bool()
    if "negatives_from" not in options:
        batch = SpladeBatch(rows, rows, own, candidate_mask=some)
        value = objective(batch).terms["info_nce"].item()
        assert value == pytest.approx(_chance(objective, batch).item(), rel=1e-5)
    summed = SpladeObjective({"info_nce": 1.0}, info_nce=InfoNCELoss(reduction="sum"))
    assert _chance(summed, batch) == math.inf


def test_a_loop_without_an_objective_multiplies_by_the_weight():
    controller = SparsityController(weight=0.25, target_active=50)
    assert (controller.weight.shape, controller.weight.item()) == ((), 0.0)
    parameter = torch.nn.Parameter(torch.ones(V))
    optimizer = torch.optim.SGD([parameter], lr=1e-6)
    handle = controller.attach(optimizer)
    weight = controller.weight
    for _ in range(6):
        controller.observe(parameter.expand(4, V))
        (controller.weight * parameter.square().sum()).backward()
        optimizer.step()
    assert weight is controller.weight, "it is changed in place"
    assert 0.25 < weight.item() == pytest.approx(controller.report()["weight"])
    handle.remove()
    optimizer.step()
    assert controller.report()["step"] == 6
    resumed = SparsityController(weight=9.0, target_active=50)
    resumed.load_state_dict(controller.state_dict())
    assert torch.equal(resumed.weight, weight)


def test_when_all_rows_are_dead_it_names_the_checkpoint():
    _, controller = _controller(steps=100)  # a window of four
    controller.checkpoint = "runs/7/step-1.pt"
    for active in (900, 0, 0, 0, 5, 0, 0, 0):  # a row that is alive again ends the wait
        _look(controller, _rows(active, dead=0 if active else 10))
    assert controller.report()["active"] is not None
    controller.observe(_rows(0, dead=10))
    with pytest.raises(CollapseError, match=r"step 9.*dead rows: 5\).*runs/7/step-1\.pt.*logits"):
        controller.step()
    assert "collapsed" in str(controller)


def test_a_run_that_was_never_alive_says_so():
    _, controller = _controller()
    with pytest.raises(CollapseError, match=r"\(every step had dead rows\).*name yours in"):
        _look(controller, _rows(0), times=20)


def test_statuses_that_need_action_are_warnings_and_are_told_once(caplog):
    caplog.set_level(logging.INFO, logger="sparse_losses")
    _, controller = _controller(target_active=50)
    _look(controller, _rows(900), times=3)
    _look(controller, _rows(20), times=120)
    told = [(record.levelname, record.message.rpartition(", ")[2]) for record in caplog.records]
    assert told == [("WARNING", "unreachable: too sparse without FLOPS")]
    _look(controller, _rows(500), times=40)
    assert caplog.records[-1].levelname == "INFO"
    assert caplog.records[-1].message.endswith("sparsifying")


def test_a_resumed_run_steers_as_the_first_one_would():
    def looks(n):
        return _rows(round(900 * 0.97**n) + 40, rows=6 + n % 3)

    objective, controller = _controller()
    for n in range(100):
        if n == 40:
            controller.observe(looks(n))  # within a step
            state = controller.state_dict()
            controller.step()
            continue
        _look(controller, looks(n))
    other, resumed = _controller()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    resumed.step()
    for n in range(41, 100):
        _look(resumed, looks(n))
    assert other.weights == objective.weights
    assert resumed.report() == controller.report()


@pytest.mark.parametrize(("target", "status"), [(256, "relaxing"), (16, "sparsifying")])
def test_a_resumed_run_with_another_target_steers_to_that(target, status, caplog):
    _, controller = _controller(target_active=64)
    assert _look(controller, _rows(68), times=100) == "on target"
    objective, resumed = _controller(target_active=target)
    resumed.load_state_dict(controller.state_dict())
    assert f"the target is {target}, in the loaded state it was 64" in caplog.text
    assert resumed.report()["active"] == pytest.approx(68)
    before = _weight(objective)
    assert _look(resumed, _rows(68)).startswith(status[:8] if target < 64 else "braking")
    assert (_weight(objective) > before) == (target < 68)


def test_length_and_maximum_are_those_of_the_resumed_controller():
    _, controller = _controller(steps=100, maximum=0.5)
    _look(controller, _rows(900), times=20)
    objective, resumed = _controller(steps=400, maximum=0.02)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.steps == 400
    _look(resumed, _rows(900), times=200)
    assert _weight(objective) == pytest.approx(0.02)
    assert resumed.report()["status"] == "unreachable: too dense at the largest weight"


def test_attached_controllers_observe_their_side_in_training_and_count_optimiser_steps():
    objective = SpladeObjective({"query_flops": 0.1, "document_flops": 0.2})
    query, document = (
        SparsityController(objective, term, target_active=3)
        for term in ("query_flops", "document_flops")
    )
    handle = document.attach(optimizer := _optimizer())
    query.attach(optimizer)
    batch = SpladeBatch(Texts(_rows(5)), Texts(_rows(300)), Texts(_rows(100).expand(10, 10, V)))
    for _ in range(2):
        objective(batch)
        objective.eval()
        objective(SpladeBatch(Texts(_rows(1)), Texts(_rows(1))))  # a validation batch
        objective.train()
        optimizer.step()
    # 10 positives of 300 and 100 negatives of 100.
    assert document.report()["active"] == pytest.approx((10 * 300 + 100 * 100) / 110)
    assert query.report()["active"] == pytest.approx(5.0)
    with pytest.raises(RuntimeError, match="attached once"):
        document.attach(optimizer)
    handle.remove()
    optimizer.step()
    assert document.report()["step"] == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_text_that_is_no_number_leaves_weight_and_state_finite(bad):
    objective = SpladeObjective({"info_nce": 1.0})
    controller = SparsityController(objective, target_active=4, steps=100)
    controller.attach(optimizer := _optimizer())
    of_loop = SparsityController(weight=1.0, target_active=4, steps=100)
    for step in range(12):
        x = torch.rand(4, 32) + torch.eye(4, 32) * 40
        if step <= 5:
            x[3, 5] = bad
        _, terms = objective(SpladeBatch(Texts(torch.eye(4, 32) * 3), Texts(x)))
        of_loop.observe(x, info_nce=terms["info_nce"])
        of_loop.step()
        optimizer.step()
        _, other = _controller(target_active=4)
        other.load_state_dict(json.loads(json.dumps(controller.state_dict())))
        assert all(map(math.isfinite, (_weight(objective), of_loop.weight)))
    assert min(_weight(objective), of_loop.weight) > 0


def test_signed_logits_with_a_negative_sum_are_counted():
    _, controller = _controller()
    assert _look(controller, -torch.ones(3, V) + 1.5 * _rows(400, rows=3), times=8) == "sparsifying"


def _posting(**options):
    objective = SpladeObjective({"document_flops": 0.01})
    return objective, SparsityController(objective, target_posting=0.2, steps=100, **options)


def test_a_target_of_the_longest_posting_list_steers_by_the_most_frequent_dimension():
    """Half of the texts activate the first dimension, a quarter the second, and few the others."""
    objective, controller = _posting()
    for _ in range(12):
        x = torch.zeros(8, V)
        x[:4, 0] = x[:2, 1] = 1.0
        x[:, 500:] = torch.rand(8, V - 500) > 0.98
        _look(controller, x)
    report = controller.report()
    assert report["longest_list"] == pytest.approx(0.5, rel=1e-3)
    assert (report["target"], report["active"]) == (0.2, None)
    assert _weight(objective) > 0.01, "the list is too long"
    assert "longest list 50.0% of 20.0% wanted" in str(controller)
    controller.observe(_rows(3))  # within a step
    state = json.loads(json.dumps(controller.state_dict()))
    other, resumed = _posting()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    for each in (controller, resumed):
        _look(each, _rows(1))
    assert other.weights == objective.weights
    assert resumed.report() == controller.report()


def test_frequencies_fade_so_that_a_shorter_list_is_seen():
    _, controller = _posting()
    for rows in [_rows(1)] * 10 + [_rows(1, dead=8)] * 300:
        _look(controller, rows)
    assert controller.report()["longest_list"] == pytest.approx(0.2, rel=0.3)


def test_a_controller_may_follow_the_optimiser_and_see_other_texts():
    objective = SpladeObjective({"info_nce": 1.0})
    controller = SparsityController(objective, target_active=3)
    controller.attach(optimizer := _optimizer(), observe=False)
    batch = SpladeBatch(Texts(torch.eye(8)), Texts(torch.eye(8)))
    for step in range(1, 21):
        if step % 5 == 0:
            controller.observe(_rows(30))
        objective(batch)
        optimizer.step()
        assert (controller.report()["active"] is None) == (step < 5)
    assert controller.report()["active"] == pytest.approx(30)
    assert _weight(objective) > 0.03 * 0.05 / FlopsLoss()(torch.eye(8)).item()


def test_a_weight_changed_by_other_code_is_an_error():
    objective, controller = _controller()
    objective.weights["document_flops"] = 3.0
    controller.observe(_rows(900))
    with pytest.raises(RuntimeError, match="only the controller may set it"):
        controller.step()


def test_rows_with_nan_and_empty_batches_change_nothing():
    _, controller = _controller()
    _look(controller, _rows(900))
    before = controller.report()
    _look(controller, torch.full((4, V), torch.nan))
    _look(controller, torch.zeros(0, V))
    assert controller.report() == before | {"step": 3}
    mixed = _rows(900)
    mixed[3, 5] = torch.nan
    _look(controller, mixed)
    assert controller.report()["dead_rows"] == 0.0
    assert controller.report()["active"] == pytest.approx(900)


def test_a_copy_of_an_attached_objective_is_not_watched():
    objective, controller = _controller()
    controller.attach(_optimizer())
    other = copy.deepcopy(objective)
    other(SpladeBatch(Texts(_rows(5)), Texts(_rows(300))))
    controller.step()
    assert controller.report()["active"] is None
    objective(batch=SpladeBatch(Texts(_rows(5)), Texts(_rows(300))))
    controller.step()
    assert controller.report()["active"] == pytest.approx(300.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_active": 0}, "`target_active`"),
        ({"start": 0.0}, "`start` to be .* > 0"),
        ({"maximum": 0.0}, "`maximum`"),
        ({"steps": 0}, "`steps`"),
        ({"term": "info_nce"}, "`term`"),
    ],
)
def test_wrong_settings_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        _controller(**options)


def test_wrong_inputs_are_errors():
    with pytest.raises(TypeError, match="`objective` to be a SpladeObjective, got dict"):
        SparsityController({"document_flops": 0.1}, target_active=3)
    for both in ({}, {"objective": SpladeObjective({}), "weight": 1.0}):
        with pytest.raises(TypeError, match="either `objective` or `weight`, got"):
            SparsityController(**both, target_active=3)
    for targets in ({}, {"target_active": 3, "target_posting": 0.1}):
        with pytest.raises(TypeError, match="either `target_active` or `target_posting`, got"):
            SparsityController(weight=1.0, **targets)
    for share in (0.0, 1.0):
        with pytest.raises(ValueError, match="`target_posting`"):
            SparsityController(weight=1.0, target_posting=share)
    _, posting = _posting()
    _look(posting, _rows(3))
    for one, other in ((posting, _controller()[1]), (_controller()[1], posting)):
        with pytest.raises(ValueError, match=r"state of a `target_\w+`, got that of a `target_"):
            one.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=r"`weight` to be .* > 0"):
        SparsityController(weight=0.0, target_active=3)
    learned = SpladeObjective({"document_flops": torch.tensor(1.0)})
    with pytest.raises(TypeError, match="to be a number, got a tensor"):
        SparsityController(learned, target_active=3)
    _, controller = _controller(target_active=V)
    with pytest.raises(ValueError, match="`steps`"):
        controller.steps = 0
    for _ in range(49):  # other losses may take some steps
        controller.step()
    with pytest.raises(RuntimeError, match=r"`observe\(activations\)` .*, got none in 50 steps"):
        controller.step()
    with pytest.raises(ValueError, match=r"expected `activations` of shape \[\.\.\., V\], got"):
        controller.observe(_rows(3)[0])
    with pytest.raises(ValueError, match=f"expected `target_active` below V = {V}, got {V}"):
        controller.observe(_rows(3))
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, got Linear"):
        controller.attach(torch.nn.Linear(2, 2))


def test_a_second_controller_of_a_term_is_refused_at_construction():
    objective, controller = _controller(SpladeObjective({"document_flops": 1.0, "query_flops": 1}))
    with pytest.raises(ValueError, match="expected one controller of 'document_flops', got a sec"):
        _controller(objective)
    _controller(objective, term="query_flops")
    _controller(copy.deepcopy(objective))  # the copy's weight is another
    del controller
    _controller(objective)


def test_a_state_holds_plain_numbers_whatever_it_was_made_with(tmp_path):
    """``torch.load`` and JSON refuse NumPy's, which a sweep over an array brings."""
    objective = SpladeObjective({"document_flops": np.float32(0.125)})
    controller = SparsityController(
        objective, target_active=np.int64(40), steps=np.int64(90), start=np.float64(0.1)
    )
    for active in (900, 600, 700):
        _look(controller, _rows(active), times=5)
    state = controller.state_dict()
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
    assert json.loads(json.dumps(state)) == state
    _, resumed = _controller(target_active=40)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert resumed.state_dict() == state


def test_a_list_of_schedules_shows_the_state():
    _, controller = _controller(target_active=40)
    _look(controller, _rows(60))
    assert "document_flops: 60.0 active of 40 wanted" in str(controller)
    assert repr([controller]) == f"[SparsityController({controller})]"


@pytest.mark.parametrize(
    ("active", "said"),
    [
        (64, None),
        (80, None),
        (20, "the ranking loss alone leaves fewer"),
        (150, "`calibrate` prunes the rest"),
    ],
)
def test_the_outcome_says_what_to_do_where_the_target_was_missed(active, said):
    controller = SparsityController(weight=1.0, target_active=64)
    assert "`attach` it, or call `observe` and `step`" in controller.outcome()
    for _ in range(40):
        controller.observe((torch.arange(200) < active).float().expand(4, 200))
        controller.step()
    if said is None:
        assert controller.outcome() == str(controller)
    else:
        assert controller.outcome().startswith(f"{controller}; ")
        assert said in controller.outcome()


def test_every_remedy_is_of_a_status_and_every_unreachable_status_has_one():
    source = inspect.getsource(Descent._status)
    found = re.findall(r'return f?"((?:unreachable|collapsing|waiting): [^"{]*)', source)
    assert len(found) == 5
    for status in found:
        assert sum(status.startswith(name) for name in REMEDIES) == 1


def test_before_the_first_measurement_there_is_nothing_to_report_and_a_state_to_load():
    _, controller = _controller(target_active=40)
    report = controller.report()
    assert [report[n] for n in ("active", "dead_rows", "mean_activation")] == [None] * 3
    _, other = _controller(target_active=30)
    other.load_state_dict(controller.state_dict())
    assert other.report() == {**report, "target": 30}


def test_the_state_of_something_else_is_an_error():
    _, controller = _controller()
    state = controller.state_dict()
    for wrong, message in (
        (state | {"term": "query_flops"}, "state for 'document_flops', got one for 'query_flops'"),
        ({"steps_taken": 3}, "SparsityController, got one that lacks or adds brake"),
        (None, "state of a SparsityController, got NoneType"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            controller.load_state_dict(wrong)
    assert controller.state_dict() == state


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("level", "0"),
        ("log_ratio", math.nan),
        ("first_weight", math.inf),
        ("sent", [1.0] * 10),
        ("new", ["a"] * 10),
        ("new", 3.0),
        ("frequency", "x"),
        ("frequency", 3),
        ("of_a_later_version", 1),
        ("target", 0),
    ],
)
def test_a_damaged_state_is_an_error_and_changes_nothing(name, bad):
    objective, controller = _controller()
    _look(controller, _rows(900))
    before, weights = controller.state_dict(), dict(objective.weights)
    with pytest.raises((ValueError, TypeError)):
        controller.load_state_dict({**before, name: bad})
    assert controller.state_dict() == before
    assert objective.weights == weights


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dense_rows_in_half_precision_are_counted(dtype):
    _, controller = _controller(target_active=50)
    x = torch.full((3, 100_000), 2.0, dtype=dtype)  # a sum of 200,000, which fp16 does not hold
    x[2, 0] = math.nan
    _look(controller, x)
    report = controller.report()
    assert (report["active"], report["mean_activation"]) == (pytest.approx(100_000), 2.0)
