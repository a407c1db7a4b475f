"""Does a mix deal out what it says, from data and without it?"""

from __future__ import annotations

import gzip
import json
from collections import Counter

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.types import Slo
from headway.whatif.load import mix, prompts

TIMES = np.arange(500) / 10


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data directory with both sets of chat-batch."""
    rows = {
        "sharegpt_first_turn": [_row(f"chat {n}", smollm2=10) for n in range(40)],
        "sharegpt_mixed_roles": [
            *(_row(f"batch {n}", smollm2=n) for n in (199, 200, 500, 1000, 1001)),
            _row("counted otherwise", llama2=300),
            _row("x" * 3 * 1401, llama2=300),
            _row("x" * 3 * 250),
        ],
    }
    (tmp_path / "prompts").mkdir()
    for name, lines in rows.items():
        with gzip.open(tmp_path / "prompts" / f"{name}.jsonl.gz", "wt") as file:
            file.write("\n".join(lines) + "\n")
    monkeypatch.setenv("HEADWAY_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def no_data(monkeypatch):
    monkeypatch.delenv("HEADWAY_DATA", raising=False)


def _row(text: str, **counts: int) -> str:
    return json.dumps({"prompt": text, **({"prompt_tokens": counts} if counts else {})})


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# ---- the built-in mix


def test_chat_batch_is_what_it_says(data):
    dealt = mix.calls(mix.load("chat-batch"), TIMES, rng())
    assert [call.at for call in dealt] == list(TIMES)
    count = Counter(call.tier for call in dealt)
    assert 260 < count["chat"] < 340
    chat = next(call for call in dealt if call.tier == "chat")
    batch = next(call for call in dealt if call.tier == "batch")
    assert (chat.max_tokens, chat.ignore_eos, chat.priority) == (128, False, 0)
    assert chat.slo == Slo(ttft=1.5, tpot=0.15)
    assert (batch.max_tokens, batch.ignore_eos, batch.priority, batch.slo) == (256, True, 10, Slo(soft=600.0))


def test_deadlines_promise_first_tokens_and_whole_answers(no_data):
    dealt = mix.calls(mix.load("deadlines"), TIMES, rng(), warn=lambda line: None)
    count = Counter(call.tier for call in dealt)
    assert [count[tier] for tier in ("chat", "code", "batch")] == pytest.approx([250, 150, 100], abs=35)
    promised = {call.tier: call.slo for call in dealt}
    assert promised == {"chat": Slo(ttft=1.5, tpot=0.15), "code": Slo(e2e=8.0), "batch": Slo(soft=600.0)}
    assert dealt == mix.calls(mix.load("deadlines"), TIMES, rng(), warn=lambda line: None)


def test_prompts_stay_in_their_band_and_below_the_context(data):
    dealt = mix.calls(mix.load("chat-batch"), TIMES, rng())
    used = {call.prompt for call in dealt if call.tier == "batch"}
    assert used == {"batch 200", "batch 500", "batch 1000", "counted otherwise", "x" * 750}


def test_all_prompts_come_before_one_comes_twice(data):
    texts = prompts.draw("sharegpt_first_turn", None, 100, rng())
    assert len(set(texts[:40])) == len(set(texts[40:80])) == 40


def test_the_same_seed_gives_the_same_calls(data):
    chosen = mix.load("chat-batch")
    assert mix.calls(chosen, TIMES, rng(1)) == mix.calls(chosen, TIMES, rng(1))
    assert mix.calls(chosen, TIMES, rng(1)) != mix.calls(chosen, TIMES, rng(2))


def test_no_arrivals_no_calls(no_data):
    assert mix.calls(mix.load("chat-batch"), np.empty(0), rng(), warn=lambda line: None) == []


# ---- without data


def test_made_text_stands_in_visibly(no_data, capsys):
    chosen = mix.load("chat-batch")
    dealt = mix.calls(chosen, TIMES, rng())
    seen = capsys.readouterr()
    assert seen.out == ""
    assert "Warning: The workload uses generated text instead of sharegpt_first_turn" in seen.err
    assert "generated text instead of sharegpt_mixed_roles, because HEADWAY_DATA" in mix.describe(chosen)
    sizes = [len(call.prompt.split()) for call in dealt if call.tier == "batch"]
    assert min(sizes) >= 200
    assert max(sizes) <= 1000
    assert dealt == mix.calls(chosen, TIMES, rng(), warn=lambda line: None)


def test_with_data_nothing_is_replaced(data, capsys):
    mix.calls(mix.load("chat-batch"), TIMES, rng())
    assert capsys.readouterr().err == ""
    assert mix.describe(mix.load("chat-batch")) == (
        "chat-batch: 60% chat (sharegpt_first_turn; up to 128 tokens out; ttft:1500 tpot:150), "
        "40% batch (sharegpt_mixed_roles; 200 to 1000 tokens in; exactly 256 tokens out; no SLO)"
    )


def test_asking_for_made_text_is_no_replacement(no_data, capsys):
    mix.calls(mix.Mix("m", (mix.TrafficTier("a"),)), TIMES, rng())
    assert capsys.readouterr().err == ""


def test_made_lengths_are_sharegpts():
    drawn = prompts.lengths(50_000, None, rng())
    assert drawn.mean() == pytest.approx(110.6, rel=0.05)
    assert drawn.std() == pytest.approx(186.9, rel=0.05)
    assert (drawn.min(), drawn.max() <= 1024) == (4, True)


@pytest.mark.parametrize("band", [(200, 1000), (7, 7), (1100, 1200), (1, 3), (1000, 5000)])
def test_made_lengths_keep_the_band(band):
    drawn = prompts.lengths(200, band, rng())
    assert drawn.min() >= band[0]
    assert drawn.max() <= min(band[1], prompts.LONGEST)


# ---- sources


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz"])
def test_prompts_from_a_file(tmp_path, name):
    file = tmp_path / name
    text = _row("one") + "\n\n" + _row("two") + "\n"
    file.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    assert sorted(prompts.draw(str(file), None, 2, rng())) == ["one", "two"]


@pytest.mark.parametrize("line", ["nonsense", "[]", '{"text": "x"}', '{"prompt": "x", "prompt_tokens": 3}'])
def test_a_bad_prompt_names_its_line(tmp_path, line):
    file = tmp_path / "p.jsonl"
    file.write_text(_row("one") + "\n" + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        prompts.draw(str(file), None, 1, rng())


def test_a_damaged_file_is_said(tmp_path):
    file = tmp_path / "p.jsonl.gz"
    file.write_bytes(gzip.compress(_row("one").encode())[:-6])
    with pytest.raises(ConfigError, match="cannot be read"):
        prompts.draw(str(file), None, 1, rng())


def test_a_band_without_prompts_is_said(data):
    with pytest.raises(ConfigError, match="no prompt of 1 to 2 tokens"):
        prompts.draw("sharegpt_first_turn", (1, 2), 1, rng())
    with pytest.raises(ConfigError, match="1400"):
        prompts.lengths(1, (1500, 1600), rng())


def test_an_unknown_set_names_the_nearest(data, monkeypatch):
    with pytest.raises(ConfigError, match="Did you mean sharegpt_first_turn"):
        prompts.draw("sharegpt_first_trun", None, 1, rng())
    monkeypatch.delenv("HEADWAY_DATA")
    with pytest.raises(ConfigError, match="Did you mean humaneval"):
        prompts.draw("humanevil", None, 1, rng())
    with pytest.raises(ConfigError, match="no prompts at"):
        prompts.draw("./nowhere.jsonl", None, 1, rng())


# ---- files and words


def test_a_mix_from_a_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        '[code]\nshare = 3\nslo = "ttft:500 e2el:9000"\nmax_tokens = 64\npriority = 1\n'
        "prompt_tokens = [10, 20]\n[bulk]\nignore_eos = true\n"
    )
    found = mix.load(file)
    code, bulk = found.tiers
    assert found.name == "mine"
    assert code == mix.TrafficTier("code", 3, Slo(ttft=0.5, e2e=9.0), max_tokens=64, priority=1, prompt_tokens=(10, 20))
    assert bulk.ignore_eos
    assert list(found.shares) == [0.75, 0.25]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a]\nmax_token = 3", "Did you mean max_tokens"),
        ("share = 3", r"Begin a class with \[share\]"),
        ("[a]\nmax_tokens = true", "must be of type int"),
        ("[a]\nshare = 0", "share above 0"),
        ("[a]\nshare = nan", "share above 0"),
        ("[a]\nmax_tokens = 0", "Give 1 or more"),
        ("[a]\nprompt_tokens = [5]", r"\[least, most\]"),
        ("[a]\nprompt_tokens = [5, 4]", r"\[least, most\]"),
        ('[a]\nslo = "ttft:0"', "ttft:1500"),
        ('["a b"]\nshare = 1', "cannot name a class"),
        ("[a\n", "not TOML"),
        ("", "at least one"),
    ],
)
def test_a_bad_file_says_what_to_mend(tmp_path, text, said):
    file = tmp_path / "m.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        mix.load(file)


def test_an_unknown_mix_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean chat-batch"):
        mix.load("chatbatch")


def test_a_promise_in_goodput_words():
    assert mix.parse_slo("ttft:1500 tpot:150 e2el:20000") == Slo(1.5, 0.15, 20.0)
    assert mix.format_slo(Slo(1.5, 0.15, 20.0)) == "ttft:1500 tpot:150 e2el:20000"
    assert mix.parse_slo("") == Slo()


@pytest.mark.parametrize("text", ["tfft:1", "ttft", "ttft:", "ttft:-1", "ttft:inf", "ttft:1 ttft:2", "e2e:5"])
def test_a_bad_promise_is_refused(text):
    with pytest.raises(ConfigError):
        mix.parse_slo(text)


def test_an_override_replaces_one_class():
    changed = mix.override(mix.load("chat-batch"), "chat ttft:800 e2el:9000")
    assert changed.tiers[0].slo == Slo(ttft=0.8, e2e=9.0)
    assert changed.tiers[1] == mix.load("chat-batch").tiers[1]
    assert mix.override(mix.Mix("m", (mix.TrafficTier("a"),)), "ttft:1 tpot:2").tiers[0].slo == Slo(0.001, 0.002)


@pytest.mark.parametrize("text", ["", "chat", "chta ttft:3", "ttft:3"])
def test_an_override_must_name_a_class(text):
    with pytest.raises(ConfigError, match="the classes are chat, batch"):
        mix.override(mix.load("chat-batch"), text)
