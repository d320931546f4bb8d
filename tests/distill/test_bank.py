"""A bank of adapters on one base: swapped, averaged, chosen by request; no text ever changes."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from distill.adapters import full_head
from distill.prepare import build_pruned
from eval.decoding.adapters import AdapterError, adapted, read_adapter
from eval.decoding.build import build_decoder
from eval.decoding.drafters.adapter import SharedBase
from eval.decoding.drafters.drafter import Texts
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.drafters.pruned import pruned_drafter, save_compact
from eval.decoding.drafters.routed import by_likelihood, routed
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.stock import StockDecoder
from eval.decoding.target import load_target, weights_sha256
from eval.decoding.verification import Sampling
from eval.prompts import load_prompts
from eval.reporting.report import read_report
from eval.run import main

NAMES = ("code", "legal")
TOKENS = torch.arange(288)


@pytest.fixture(scope="module")
def bank(folder, tmp_path_factory):
    """A folder of two runs with adapters that were drawn at random, on one pruned base."""
    bank = tmp_path_factory.mktemp("bank")
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    embedding = target.get_input_embeddings().weight.detach()
    base = bank / "base" / "draft"

    def pruned():
        return build_pruned(target, 1, target.lm_head.weight.detach()[TOKENS].clone())

    save_compact(base / "compact", pruned(), TOKENS, embedding)
    whole = build_pruned(target, 1, target.lm_head.weight.detach().clone())
    whole.save_pretrained(base)
    for seed, name in enumerate(NAMES):
        torch.manual_seed(seed)
        config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules="all-linear")
        model = get_peft_model(pruned(), config)
        model.peft_config["default"].base_model_name_or_path = str(base)
        adapter = bank / name / "draft" / "adapter"
        model.save_pretrained(str(adapter))
        hashes = [weights_sha256(str(base)), weights_sha256(str(base / "compact"))]
        (adapter / "base.json").write_text(json.dumps({"base_sha256": hashes}))
        recipe = {"target": str(folder / "target"), "dtype": "float32", "temperature": 0.0}
        recipe |= {"top_k": None, "top_p": 1.0, "max_new_tokens": 16, "base": str(bank / "base")}
        (bank / name / "recipe.yaml").write_text(json.dumps(recipe))
        for part, start in (("eval", 0), ("tuning", 10)):
            rows = (folder / "train.jsonl").read_text().splitlines()[start + seed :: 3][:4]
            (bank / name / "prompts").mkdir(exist_ok=True)
            (bank / name / "prompts" / f"{part}.jsonl").write_text("\n".join(rows))
    full = bank / "code-full"
    shutil.copytree(base, full / "draft")
    (full / "recipe.yaml").write_text((bank / "code" / "recipe.yaml").read_text())
    return bank


@pytest.fixture(scope="module")
def target(folder):
    return load_target(str(folder / "target"), torch.float32, "cpu", 200)


@pytest.fixture(scope="module")
def base(bank, target):
    return SharedBase(str(bank / "base" / "draft"), target, "auto")


@pytest.fixture(scope="module")
def drafts(bank, base):
    return {name: base.drafter(read_adapter(bank / name / "draft" / "adapter")) for name in NAMES}


@pytest.fixture(scope="module")
def prompts(folder, target):
    given = load_prompts(str(folder / "train.jsonl"))[:4]
    return given, [target.tokenizer(one.prompt)["input_ids"] for one in given]


@pytest.fixture(scope="module")
def texts(target, prompts):
    return [run.tokens for run in decoded(target, None, prompts)]


def decoded(target, drafter, prompts, gamma=3, temperature=0.0):
    how = Decoding(Sampling(temperature), target.stops, 24)
    return decode(target.decoder, drafter, *prompts, how, DraftLength(gamma))


@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_no_adapter_changes_a_text(bank, base, drafts, target, prompts, texts, gamma):
    """The wrong one included, and rows of one batch with different ones."""
    by_turns = iter(["code", "legal", "legal", "code"] * 50)
    contenders = {
        **drafts,
        "average": base.average([read_adapter(bank / n / "draft" / "adapter") for n in NAMES]),
        "liked best": routed(base, drafts, by_likelihood(drafts)),
        "by turns": routed(base, drafts, lambda ids: next(by_turns)),
        "by its folder": load_drafter(f"adapter:{bank / 'legal' / 'draft' / 'adapter'}", target),
        "by the bank's": load_drafter(f"routed:{bank}", target),
        "behind lookup": load_drafter(f"lookup-first:routed:{bank}", target),
    }
    for name, drafter in contenders.items():
        together = decoded(target, drafter, prompts, gamma)
        assert [run.tokens for run in together] == texts, name
        assert sum(sum(run.drafted) for run in together) > 0
        for one, own, text in zip(*prompts, texts, strict=True):
            assert decoded(target, drafter, ([one], [own]), gamma)[0].tokens == text, name


def test_a_row_of_a_batch_drafts_what_it_drafts_alone(base, drafts, target, prompts):
    ids = prompts[1]
    chosen = {tuple(own): NAMES[row % 2] for row, own in enumerate(ids)}
    drafter = routed(base, drafts, lambda own: chosen[tuple(own)])
    together = decoded(target, drafter, prompts)
    for row, run in enumerate(together):
        alone = decoded(target, drafts[NAMES[row % 2]], ([prompts[0][row]], [ids[row]]))[0]
        assert (run.drafted, run.accepted) == (alone.drafted, alone.accepted)


def test_rows_of_different_adapters_bring_their_doubts(base, drafts, target, prompts):
    """By these the draft length of `routed` is chosen."""
    ids = prompts[1][:2]
    chosen = {tuple(own): NAMES[row] for row, own in enumerate(ids)}
    drafter = routed(base, drafts, lambda own: chosen[tuple(own)])

    def proposed(drafter, rows):
        states = [{} for _ in rows]
        texts = Texts([[*own, 9] for own in rows], 60, Sampling(), torch.Generator(), states)
        return drafter.start(texts).propose(4, 1e-9)

    together = proposed(drafter, ids)
    for row, own in enumerate(ids):
        alone = proposed(drafts[NAMES[row]], [own])
        torch.testing.assert_close(together.certainty[row], alone.certainty[0])
    assert together.certainty[:, 1:].max() < 1  # the first token is drafted in any case


def test_rows_that_are_sampled_bring_their_q(base, drafts, target, prompts):
    chosen = {tuple(own): NAMES[row % 2] for row, own in enumerate(prompts[1])}
    drafter = routed(base, drafts, lambda own: chosen[tuple(own)])
    runs = decoded(target, drafter, prompts, temperature=1.0)
    assert sum(sum(run.drafted) for run in runs) > 0


def test_an_adapter_drafts_what_its_merged_draft_does(bank, base, drafts, target):
    model = adapted(base.model, read_adapter(bank / "code" / "draft" / "adapter"))
    merged = pruned_drafter(model, TOKENS, target)
    ids, text = [5, 9, 20, 40], [7, 8, 30, 31]
    (mine,) = drafts["code"].teacher_forced(ids, text, [Sampling(1.0)], {})
    (theirs,) = merged.teacher_forced(ids, text, [Sampling(1.0)], {})
    (other,) = drafts["legal"].teacher_forced(ids, text, [Sampling(1.0)], {})
    assert torch.equal(mine, theirs)
    assert not torch.allclose(mine, other, atol=1e-3)


def test_a_swap_makes_nothing_but_layers(base, drafts, target):
    plain = base.plain.decoder
    for draft in drafts.values():
        assert draft.decoder.head is plain.head
        assert draft.decoder.embedding.data_ptr() == target.decoder.embedding.data_ptr()
        assert draft.decoder.layer_bytes() == plain.layer_bytes() < plain.own_bytes()
    both = routed(base, drafts, by_likelihood(drafts))
    assert both.bytes == base.plain.bytes + plain.layer_bytes()


def test_the_stock_decoder_swaps_as_well(bank, base, drafts):
    """What other families run on: the same logits as the lean one's."""
    model = adapted(base.model, read_adapter(bank / "code" / "draft" / "adapter"))
    swapped = StockDecoder(base.model, 64).with_layers(model)
    lean = build_decoder(base.model, 64).with_layers(model)
    ids = torch.tensor([[5, 9, 20, 40]])
    made = [one.forward(ids, 0, one.new_cache(1, 8)) for one in (swapped, lean)]
    torch.testing.assert_close(*made, atol=1e-4, rtol=1e-4)
    assert 0 < swapped.layer_bytes() < swapped.own_bytes()


def test_the_adapter_that_likes_a_text_best_is_its_own(drafts):
    """Texts that each draft wrote itself."""
    route = by_likelihood(drafts)
    for name, draft in drafts.items():
        text = [5]
        for _ in range(30):
            logits = draft.decoder.forward(
                torch.tensor([text]), 0, draft.decoder.new_cache(1, 64), last_only=True
            )
            text.append(int(TOKENS[logits[0, -1].argmax()]))
        assert route(text) == name
    assert route([5]) in NAMES  # one token tells nothing


def evaluated(bank, out, *more):
    short = ["--max_gamma", "2", "--speed_prompts", "2", "--device", "cpu"]
    return main(["--bank", str(bank), "--output_dir", str(out), *short, *more])


def test_the_matrix_stands_in_the_report(bank, tmp_path, capsys):
    assert evaluated(bank, tmp_path, "--gamma", "2") == 0
    report = read_report(tmp_path / "report" / "report.json")
    drafts = ["base", *NAMES, "code-full", "average", "routed"]
    assert list(report.drafts) == drafts
    assert report.bank.domains == list(NAMES)
    assert [(c.draft, c.domain) for c in report.bank.cells] == [
        (draft, domain) for draft in drafts for domain in NAMES
    ]
    for cell in report.bank.cells:
        numbers = report.drafts[cell.draft].by_category[cell.domain]
        assert cell.alpha.mean == pytest.approx(numbers.alpha.mean)
        assert cell.speedup.mean == pytest.approx(numbers.speedup.mean)
        base = report.bank.cells[NAMES.index(cell.domain)]
        if cell.draft == "base":
            assert cell.alpha_over_base is None
        else:
            apart = cell.alpha.mean - base.alpha.mean
            assert cell.alpha_over_base.mean == pytest.approx(apart)
    for adapter in report.bank.adapters:
        other = [n for n in NAMES if n != adapter.name]
        (cell,) = [c for c in report.bank.row(adapter.name) if c.domain in other]
        assert adapter.forgetting.mean == pytest.approx(-cell.alpha_over_base.mean)
        assert adapter.swap_ms > 0
        assert adapter.of_base == pytest.approx(adapter.bytes / report.bank.base_bytes)
    routing = report.bank.routing
    assert routing.accuracy.n == 8
    assert [g.over for g in routing.gain] == [*drafts[:-1], "the right adapter"]
    assert all(d.lossless.identical == d.lossless.prompts for d in report.drafts.values())
    page = (tmp_path / "report" / "report.html").read_text()
    assert page.count('<table class="bank">') == 2
    written = (tmp_path / "report" / "report.md").read_text()
    for title in ("## Drafts and domains", "## Adapters", "## Routing"):
        assert title in written
    assert "Drafts and domains" in capsys.readouterr().out


def test_a_bank_of_one_adapter_has_nothing_to_choose(bank, tmp_path):
    one = tmp_path / "bank"
    shutil.copytree(bank / "code", one / "code")
    assert evaluated(one, tmp_path / "out", "--gamma", "2") == 0
    found = read_report(tmp_path / "out" / "report" / "report.json")
    assert list(found.drafts) == ["base", "code"]
    assert found.bank.routing is None
    assert found.bank.adapters[0].forgetting is None


def test_banks_that_cannot_be_are_refused(bank, tmp_path, capsys):
    def refused(folder, message, *more):
        assert evaluated(folder, tmp_path / "out", *more) == 2
        assert message in capsys.readouterr().err

    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "holds no run with an adapter")
    shutil.copytree(bank, tmp_path / "mixed")
    path = tmp_path / "mixed" / "legal" / "recipe.yaml"
    recipe = json.loads(path.read_text())
    path.write_text(json.dumps(recipe | {"dtype": "bfloat16"}))
    refused(tmp_path / "mixed", "differ in dtype")
    path.unlink()
    refused(tmp_path / "mixed", "differ in target")
    (tmp_path / "mixed" / "code" / "recipe.yaml").unlink()
    refused(tmp_path / "mixed", "it has no recipe.yaml")
    shutil.copytree(bank / "code", tmp_path / "taken" / "routed")
    refused(tmp_path / "taken", "rename that folder")
    shutil.copytree(bank, tmp_path / "other")
    about = tmp_path / "other" / "legal" / "draft" / "adapter" / "base.json"
    about.write_text(json.dumps({"base_sha256": ["ab" * 32]}))
    refused(tmp_path / "other", "was trained on another base")
    with pytest.raises(SystemExit):
        evaluated(bank, tmp_path / "out", "--target", "org/target")
    assert "--bank takes target, drafts and prompts from its runs" in capsys.readouterr().err


def test_the_head_of_a_full_form_is_found(bank):
    assert full_head(str(bank / "base")).shape == (300, 32)


def test_a_sibling_is_the_base_of_its_adapters(folder, target, prompts, texts, tmp_path):
    """A whole checkpoint: here of the target's own shape and of other weights."""
    torch.manual_seed(5)
    sibling = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    with torch.no_grad():
        sibling.model.layers[1].mlp.down_proj.weight.mul_(0.5)
    place = shutil.copytree(folder / "target", tmp_path / "sibling")
    sibling.save_pretrained(place)
    config = LoraConfig(r=4, use_rslora=True, use_dora=True, target_modules=["q_proj", "up_proj"])
    model = get_peft_model(sibling, config)
    for name, weight in model.named_parameters():
        weight.data += 0.1 * torch.randn_like(weight) if "lora" in name else 0
    model.peft_config["default"].base_model_name_or_path = str(place)
    model.save_pretrained(str(tmp_path / "adapter"))
    model.merge_and_unload().save_pretrained(place.with_name("merged"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(place / name, tmp_path / "merged" / name)
    found = load_drafter(f"adapter:{tmp_path / 'adapter'}", target)
    merged = load_drafter(str(tmp_path / "merged"), target)
    (mine,) = found.teacher_forced([5, 9, 20], [7, 8], [Sampling(1.0)], {})
    (theirs,) = merged.teacher_forced([5, 9, 20], [7, 8], [Sampling(1.0)], {})
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)
    assert [run.tokens for run in decoded(target, found, prompts)] == texts


def test_an_adapter_whose_base_is_gone_names_it(bank, target, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(bank / "code" / "draft" / "adapter", folder)
    about = json.loads((folder / "adapter_config.json").read_text())
    about["base_model_name_or_path"] = "gone/base/draft"
    (folder / "adapter_config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"gone/base/draft.* was not found"):
        load_drafter(f"adapter:{folder}", target)
    found = load_drafter(f"adapter:{folder}@{bank / 'base' / 'draft'}", target)
    assert found.path == str(folder)
    with pytest.raises(AdapterError, match="is no adapter"):
        load_drafter(f"adapter:{tmp_path}", target)
