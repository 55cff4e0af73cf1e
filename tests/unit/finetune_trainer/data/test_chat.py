"""What is supervised of a chat is what the assistant says and the token that ends its turn, in any manner of template."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from finetune_job.api.inputs import LossOn
from finetune_trainer.data.records import Record, RecordProblem
from finetune_trainer.data.tokenize import tokenize
from tests.unit.finetune_trainer.data.chat_templates import (
    CHATML,
    CHATML_GENERATION,
    FAMILIES,
    HARMONY,
    LLAMA3,
    MISTRAL,
    PHI3,
    QWEN3,
    QWEN25,
    THINKING,
    TWO_STOPS,
)
from tests.unit.finetune_trainer.data.chats_by_hand import TOKENIZERS, chat, one, supervised
from tests.unit.finetune_trainer.data.tokenizers_by_hand import byte_tokenizer


def expected(family, answers, is_last=True):
    ended = [family.says(answer) + family.stop for answer in answers]
    if is_last and family.says_last:
        ended[-1] = family.says_last(answers[-1]) + family.stop
    if is_last and family is TWO_STOPS:
        ended[-1] = ended[-1].removesuffix("<|end|>") + "<|return|>"
    return ended


# Texts that a careless search would stumble over: roles, headers without their special tokens, repeated words, blank ends.
TEXTS = st.one_of(
    st.sampled_from(
        ["a", "assistant", "assistant\n", "user\n", "a b", "\n\nab", " a", "a\n", "ü€😀", "x" * 40, "[", "second answer"]
    ),
    st.text(st.characters(exclude_categories=("Cs", "Co")), min_size=1).filter(
        lambda text: text.strip() and not any(mark in text for mark in "<>[]|")
    ),
)
ANSWERS = st.one_of(TEXTS, TEXTS.map(lambda text: f"<think>\nbecause\n</think>\n\n{text}"))


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(pairs=st.lists(st.tuples(TEXTS, ANSWERS), min_size=1, max_size=4), system=st.none() | TEXTS, asks_on=st.booleans())
def test_the_supervised_text_is_every_answer_with_its_stop_token(kind, name, pairs, system, asks_on):
    family, tokenizer = FAMILIES[name], TOKENIZERS[kind][name]
    if not name.startswith(("Qwen 3", "thinking")):
        pairs = [(question, answer.split("</think>\n\n")[-1]) for question, answer in pairs]
    turns = [("s", system)] if system and family.takes_system else []
    for question, answer in pairs:
        turns += [("u", question), ("a", answer)]
    if asks_on:
        turns.append(("u", "and?"))
    record = chat(*turns)
    document = one(tokenizer, record)
    answers = [answer for _, answer in pairs]
    assert not isinstance(document, RecordProblem), document
    assert tokenizer.decode(document.input_ids) == tokenizer.apply_chat_template(list(record.messages), tokenize=False)
    wanted = expected(family, answers, not asks_on)
    found = supervised(tokenizer, document)
    assert found == wanted
    if not asks_on:
        last = one(tokenizer, record, LossOn.COMPLETION)
        assert supervised(tokenizer, last) == found[-1:]
        # Only the answers that are learnt begin with a token of their own.
        assert tokenizer.decode(last.input_ids) == tokenizer.decode(document.input_ids)
    everything = one(tokenizer, record, LossOn.ALL)
    assert tokenizer.decode(everything.input_ids) == tokenizer.decode(document.input_ids)
    assert everything.supervised == [False] + [True] * (len(everything.input_ids) - 1)


def test_tools_and_their_calls_are_shown_and_calls_are_supervised_as_words_are():
    tokenizer = TOKENIZERS["bytes"]["Qwen 2.5"]
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = (
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "once more", "tool_calls": [call, call]},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "2"},
    )
    document = one(tokenizer, Record(1, "", "", messages, (tool,)))
    called = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    # This template writes no line end before a call without words where a caller's prompt has one; so all of it is to be said.
    assert supervised(tokenizer, document) == [
        called.removeprefix("\n") + "<|im_end|>",
        "once more" + called * 2 + "<|im_end|>",
        "2<|im_end|>",
    ]
    assert '# Tools\n{"type": "function"' in tokenizer.decode(document.input_ids)


def called(name="add", arguments=None):
    return {"type": "function", "function": {"name": name, "arguments": {"a": 1} if arguments is None else arguments}}


def asked(*turns, tools=()):
    """The turns behind a question."""
    return Record(1, "", "", ({"role": "user", "content": "1 + 1?"}, *turns), tools)


def says(content=None, **more):
    return {"role": "assistant", "content": content, **more}


GENERATING_HARMONY = HARMONY.template.replace("{% else %}{% if m.thinking", "{% else %}{% generation %}{% if m.thinking").replace(
    "{% endif %}{% endif %}{% endfor %}", "{% endif %}{% endgeneration %}{% endif %}{% endfor %}"
)
TOLD = {"role": "tool", "content": "2"}


@pytest.mark.parametrize("marks_what_it_generates", [False, True])
def test_a_call_ends_with_a_token_of_its_own_and_thoughts_belong_to_their_turn(marks_what_it_generates):
    template = GENERATING_HARMONY if marks_what_it_generates else HARMONY.template
    tokenizer = HARMONY.tokenizer()
    record = asked(
        says("", thinking="I should add", tool_calls=[called()]),
        TOLD,
        says("", tool_calls=[called()]),
        {**TOLD, "content": ""},
        says("2", thinking="so it is"),
    )
    call = " to=functions.add<|message|>" + '{"a": 1}<|call|>'
    wanted = [
        "<|channel|>analysis<|message|>I should add<|end|><|start|>assistant" + call,
        call,
        "<|channel|>analysis<|message|>so it is<|end|><|start|>assistant<|channel|>final<|message|>2<|return|>",
    ]
    stop_ids = tuple(tokenizer.convert_tokens_to_ids(token) for token in ("<|return|>", "<|call|>"))
    (document,) = tokenize(tokenizer, [record], LossOn.ASSISTANT, template, stop_ids=stop_ids)
    assert [text.removeprefix("<|start|>assistant") for text in supervised(tokenizer, document)] == wanted
    # Without the model's word for it nothing says that the turn ends there.
    (problem,) = tokenize(tokenizer, [record], LossOn.ASSISTANT, template)
    assert "learn to stop" in problem.reason


@pytest.mark.parametrize("loss_on", list(LossOn))
@pytest.mark.parametrize("name", ["Llama 3", "Phi 3", "ChatML", "ChatML with generation blocks"])
def test_a_template_that_leaves_out_a_call_is_a_problem_of_the_record(name, loss_on):
    turns = (says("let me see", tool_calls=[called()]), TOLD, says("2"))
    problem = one(TOKENIZERS["bytes"][name], asked(*turns), loss_on)
    assert (problem.key, problem.line) == ("messages[1].tool_calls", 1)
    assert "leaves out the call of 'add'" in problem.reason


def test_of_two_calls_the_second_is_not_left_out_either():
    record = asked(says("", tool_calls=[called(), called()]), TOLD, says("2"))
    tokenizer = HARMONY.tokenizer()
    stop_ids = (tokenizer.convert_tokens_to_ids("<|call|>"),)
    (problem,) = tokenize(tokenizer, [record], LossOn.ASSISTANT, GENERATING_HARMONY, stop_ids=stop_ids)
    assert "leaves out the call of 'add'" in problem.reason


def test_arguments_that_would_be_written_in_quotes_are_given_as_an_object_or_else_a_problem():
    turns = (says("", tool_calls=[called(arguments='{"a": "ü"}')]), TOLD, says("2"))
    document = one(TOKENIZERS["bytes"]["Qwen 2.5"], asked(*turns))
    assert '"arguments": {"a": "ü"}' in supervised(TOKENIZERS["bytes"]["Qwen 2.5"], document)[0]
    in_braces = QWEN25.template.replace("(call.function | tojson)", "call.function.name + '{' + call.function.arguments + '}'")
    assert "braces of its own" in one(TOKENIZERS["bytes"]["Qwen 2.5"], asked(*turns), template=in_braces).reason
    as_it_is = QWEN25.template.replace("(call.function | tojson)", "call.function.name + ' ' + call.function.arguments")
    document = one(TOKENIZERS["bytes"]["Qwen 2.5"], asked(*turns), template=as_it_is)
    assert supervised(TOKENIZERS["bytes"]["Qwen 2.5"], document)[0].startswith('<tool_call>\nadd {"a": "ü"}\n')


ENDING_EACH_CALL = QWEN25.template.replace(
    "'\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>'",
    "('\n<sum>' if call.function.name == 'add' else '\n<call>') + (call.function | tojson) + '<|im_end|>'",
)
"""Looks at the names of tools, so that they cannot be marked, and ends each call as it ends a turn."""


@pytest.mark.parametrize(
    ("said", "template"),
    [("let me see", None), ("", None), (None, ENDING_EACH_CALL)],
    ids=["a call behind words quotes the stop token", "a call alone quotes it", "each of two calls ends with it"],
)
def test_a_turn_whose_end_is_not_certain_is_a_problem(said, template):
    """The first stop token would cut the turn in the middle of a call, and the model would learn to stop there."""
    quoting = called(arguments={"text": "a <|im_end|> b"})
    calls = [called(), called()] if template else [quoting]
    tokenizer = TOKENIZERS["bytes"]["Qwen 2.5"]
    problem = one(tokenizer, asked(says(said, tool_calls=calls), TOLD, says("2")), template=template)
    assert isinstance(problem, RecordProblem)
    assert (problem.key, problem.line) == ("messages[1]", 1)
    assert problem.reason == "it is not certain where in the rendered text this turn of the assistant ends"
    assert "{% generation %}" in problem.fix


def test_a_stop_token_that_only_a_neighbour_quotes_leaves_the_end_certain():
    tokenizer = TOKENIZERS["bytes"]["Qwen 2.5"]
    turns = (says("once", tool_calls=[called()]), {**TOLD, "content": "<|im_end|> x"}, says("2"))
    call = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert supervised(tokenizer, one(tokenizer, asked(*turns))) == [f"once{call}", "2<|im_end|>"]


def test_a_turn_begins_right_after_the_result_of_a_tool_if_nothing_is_written_between():
    template = MISTRAL.template.replace(
        "{%- if message['role'] == 'user' %}{{- '[INST] ' }}",
        "{%- if message.role == 'tool' %}{{- '[TOOL]' + message.content + '[/TOOL]' }}"
        "{%- elif message.tool_calls %}{{- '[CALL]' + message.tool_calls[0].function.name + eos_token }}"
        "{%- elif message['role'] == 'user' %}{{- '[INST] ' }}",
    ).replace("raise_exception('roles must alternate')", "''")
    tokenizer = MISTRAL.tokenizer()
    record = asked(says(None, tool_calls=[called()]), TOLD, says(None, tool_calls=[called()]), TOLD, says("2"))
    assert supervised(tokenizer, one(tokenizer, record, template=template)) == ["[CALL]add</s>", "[CALL]add</s>", " 2</s>"]


def test_null_content_is_not_learnt_as_a_word():
    template = QWEN25.template.replace(
        "{%- if message.content %}{{- '\n' + message.content }}{%- endif %}", "{{- '\n' ~ message.content }}"
    )
    assert template != QWEN25.template
    problem = one(TOKENIZERS["bytes"]["Qwen 2.5"], asked(says(None, tool_calls=[called()]), TOLD, says("2")), template=template)
    assert (problem.key, "writes 'None' for it" in problem.reason) == ("messages[1].content", True)


@pytest.mark.parametrize("name", ["Llama 3", "Qwen 2.5", "ChatML with generation blocks"])
def test_a_turn_of_which_nothing_is_written_is_a_problem(name):
    problem = one(TOKENIZERS["bytes"][name], asked(says("", reasoning_content="because")))
    assert "learn to say nothing" in problem.reason


def test_two_turns_in_a_row_that_a_template_marks_without_a_gap_are_two():
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ '<|im_start|>' + m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = TOKENIZERS["bytes"]["ChatML"]
    record = asked(says("a"), says("b"))
    assert supervised(tokenizer, one(tokenizer, record, template=template)) == ["a<|im_end|>b<|im_end|>"]
    assert supervised(tokenizer, one(tokenizer, record, LossOn.COMPLETION, template)) == ["b<|im_end|>"]


def left_out(tokenizer, record, loss_on=LossOn.ASSISTANT):
    return [(each.key, each.value) for each in one(tokenizer, record, loss_on).left_out]


@pytest.mark.parametrize("loss_on", list(LossOn))
def test_content_that_a_template_leaves_out_is_reported(loss_on):
    thought = "<think>\nfirst because\n</think>\n\n2"
    more = ({"role": "user", "content": "and then?"}, says("<think>\nthen because\n</think>\n\n3"))
    chat = asked(says(thought), *more)
    assert left_out(QWEN3.tokenizer(), chat, loss_on) == [("messages[1].content", "first because")]
    both = [("messages[1].content", "first because"), ("messages[3].content", "then because")]
    assert left_out(THINKING.tokenizer(), chat, loss_on) == both
    keyed = asked(says("2", reasoning_content="because", thinking="because"))
    assert left_out(QWEN3.tokenizer(), keyed, loss_on) == []
    assert left_out(LLAMA3.tokenizer(), keyed, loss_on) == [("messages[1].reasoning_content", "because")]
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    assert left_out(LLAMA3.tokenizer(), asked(says("2"), tools=(tool,)), loss_on) == [("tools", "add")]
    assert left_out(QWEN25.tokenizer(), asked(says("2"), tools=(tool,)), loss_on) == []


def test_a_turn_of_another_role_that_a_template_leaves_out_is_reported():
    template = CHATML.template.replace("{% for message in messages %}", "{% for message in messages if message.role != 'tool' %}")
    record = asked(says("let me see"), {**TOLD, "content": 'it is "two"'}, says("2"))
    assert [each.key for each in one(CHATML.tokenizer(), record, template=template).left_out] == ["messages[2].content"]
    assert (
        one(
            CHATML.tokenizer(), record, template=CHATML.template.replace("message['content']", "message['content']|trim")
        ).left_out
        == ()
    )


def test_a_turn_of_weight_0_is_not_learnt():
    record = asked(says("3", weight=0), {"role": "user", "content": "really?"}, says("2"))
    tokenizer = TOKENIZERS["bytes"]["ChatML"]
    assert supervised(tokenizer, one(tokenizer, record, LossOn.ASSISTANT)) == ["2<|im_end|>"]
    assert supervised(tokenizer, one(tokenizer, record, LossOn.COMPLETION)) == ["2<|im_end|>"]


@pytest.mark.parametrize(("loss_on", "key"), [(LossOn.ALL, "messages[1].weight"), (LossOn.COMPLETION, "messages[3].weight")])
def test_a_turn_of_weight_0_is_a_problem_where_it_would_be_learnt_all_the_same(loss_on, key):
    record = asked(says("3", weight=0), {"role": "user", "content": "really?"}, says("2", weight=0))
    made = one(TOKENIZERS["bytes"]["ChatML"], record, loss_on)
    assert isinstance(made, RecordProblem)
    assert made.key == key
    assert "not learnt" in made.reason


def test_thoughts_in_a_key_of_their_own_are_supervised_with_the_answer():
    tokenizer = TOKENIZERS["bytes"]["Qwen 3"]
    messages = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "because"})
    assert supervised(tokenizer, one(tokenizer, Record(1, "", "", messages))) == ["<think>\nbecause\n</think>\n\na<|im_end|>"]


def test_a_question_at_whose_beginning_the_template_looks_is_left_as_it_is():
    tokenizer = TOKENIZERS["bytes"]["Qwen 3"]
    document = one(tokenizer, chat(("u", "<tool_response> 3"), ("a", "three")))
    assert tokenizer.decode(document.input_ids).startswith("<|im_start|>tool\n")
    assert supervised(tokenizer, document) == ["<think>\n\n</think>\n\nthree<|im_end|>"]


@pytest.mark.parametrize("name", ["ChatML", "ChatML with generation blocks", "Llama 3", "Phi 3"])
def test_an_answer_that_quotes_headers_and_stop_tokens_is_supervised_to_its_end_or_refused(name):
    tokenizer, family = TOKENIZERS["bytes"][name], FAMILIES[name]
    for quoted in ("<|im_start|>assistant\nno", "<|assistant|>\nno", f"{family.stop} no", "user<|end_header_id|>\n\nno"):
        made = one(tokenizer, chat(("u", quoted), ("a", f"yes {quoted}"), ("u", "q"), ("a", "b")))
        if not isinstance(made, RecordProblem):
            assert "".join(supervised(tokenizer, made)) == f"yes {quoted}{family.stop}b{family.stop}"


def test_text_of_private_use_characters_is_not_taken_for_marks():
    tokenizer = TOKENIZERS["bytes"]["ChatML"]
    for answer in ("\U000f0000\U000f0001\U000f0003", "\U00100000 \U00100003"):
        assert supervised(tokenizer, one(tokenizer, chat(("u", answer), ("a", answer)))) == [f"{answer}<|im_end|>"]
    assert "private use" in one(tokenizer, chat(("u", "\U000f0000"), ("a", "\U00100000"))).reason
    call = asked(says("\U000f0000\U00100000", tool_calls=[called()]), TOLD, says("2"))
    assert "private use" in one(TOKENIZERS["bytes"]["Qwen 3"], call, LossOn.ALL).reason


def test_the_begin_token_is_written_once_if_tokenizer_and_template_both_write_it():
    tokenizer = LLAMA3.tokenizer()
    begin, content = tokenizer.bos_token_id, ("u", "q")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]
    )
    assert tokenizer("q")["input_ids"][0] == begin
    assert one(tokenizer, chat(content, ("a", "b"))).input_ids.count(begin) == 1


def test_a_last_piece_that_the_template_marks_behind_the_stop_token_belongs_to_the_last_turn():
    template = (
        "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|assistant|>\n' }}"
        "{% generation %}{{ message.content + '<|end|>\n' }}{% endgeneration %}"
        "{% else %}{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}"
        "{% else %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}"
    )
    tokenizer = PHI3.tokenizer()
    record = chat(("u", "q"), ("a", "b"), ("u", "q"), ("a", "c"))
    assert supervised(tokenizer, one(tokenizer, record, template=template)) == ["b<|end|>\n", "c<|end|>\n<|endoftext|>"]
    assert supervised(tokenizer, one(tokenizer, record, LossOn.COMPLETION, template)) == ["c<|end|>\n<|endoftext|>"]


GENERATING = CHATML_GENERATION.template
NO_STOP_IN_BLOCK = GENERATING.replace(
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}", "{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}"
)
MARKS_QUESTIONS = GENERATING.replace("message['role'] == 'assistant'", "true").replace(
    "{{ '<|im_start|>assistant\n' }}{% gen", "{{ '<|im_start|>' + message['role'] + '\n' }}{% gen"
)
MARKS_MORE = GENERATING.replace("{% endfor %}", "{% endfor %}{% generation %}{{ 'more' }}{% endgeneration %}")
NO_STOP_WITHIN = "{% for m in messages %}{{ m.role + m.content }}{% if loop.last %}{{ eos_token }}{% endif %}{% endfor %}"
TWICE = CHATML.template.replace("{% endfor %}", "{% endfor %}{{ '<|im_start|>' + messages[-1].content + '<|im_end|>' }}")
QA = [("u", "q"), ("a", "b")]
COUNTING = CHATML.template.replace("message['content']", "(message['content'] | length | string) + message['content']")


@pytest.mark.parametrize(
    ("template", "turns", "loss_on", "reason"),
    [
        (None, [("u", "q")], LossOn.ASSISTANT, "no turn of the assistant"),
        (None, [*QA, ("u", "q")], LossOn.COMPLETION, "ends with a turn of the role 'user'"),
        ("{{ messages[", QA, LossOn.ASSISTANT, "TemplateSyntaxError"),
        ("{% for m in messages %}{{ m.content + 1 }}{% endfor %}", QA, LossOn.ASSISTANT, "TypeError"),
        ("{{ messages[0].content + eos_token }}", QA, LossOn.ASSISTANT, "each turn of a plain chat once"),
        ("{% for m in messages %}{{ m.role + m.content + '### ' }}{% endfor %}", QA, LossOn.ASSISTANT, "'### user'"),
        (NO_STOP_WITHIN, QA * 2, LossOn.ASSISTANT, "learn to stop"),
        (NO_STOP_IN_BLOCK, QA, LossOn.ASSISTANT, "in 0 of 1 turns"),
        (GENERATING.replace("== 'assistant'", "== 'model'"), QA, LossOn.ASSISTANT, "in 0 of 1 turns"),
        (MARKS_QUESTIONS, QA, LossOn.ASSISTANT, "in 2 of 1 turns"),
        (MARKS_MORE, QA, LossOn.ASSISTANT, "in 1 of 1 turns"),
        (TWICE, QA, LossOn.ASSISTANT, "plain chat once"),
        (COUNTING, QA, LossOn.ASSISTANT, "rewrites what the assistant says"),
    ],
)
def test_what_cannot_be_trained_on_rightly_is_a_problem_with_its_reason(template, turns, loss_on, reason):
    tokenizer = TOKENIZERS["bytes"]["ChatML"]
    good = chat(("u", "q"), ("a", "b"), line=1)
    wrong = chat(*turns, line=2)
    made = tokenize(tokenizer, [good, wrong], loss_on, template)
    assert isinstance(made[1], RecordProblem)
    assert (made[1].line, made[1].fix != "") == (2, True)
    assert reason in made[1].reason


def test_the_fix_names_the_content_that_a_template_expects_next_to_calls():
    refused = one(PHI3.tokenizer(), asked(says(None, tool_calls=[called()])))
    assert refused.fix.startswith('write "" for a content that is null, or change the record')
    left_out = one(PHI3.tokenizer(), asked(says("", tool_calls=[called()])))
    assert left_out.fix.startswith("set the content to null (some templates write calls only then), or write the call")


def test_a_wrong_record_leaves_its_neighbours_alone():
    tokenizer = TOKENIZERS["bytes"]["Gemma"]
    records = [chat(("u", "q"), ("a", str(line)), line=line) for line in (1, 3)]
    first, problem, last = tokenize(tokenizer, [records[0], chat(("a", "b"), line=2), records[1]], LossOn.ASSISTANT)
    assert isinstance(problem, RecordProblem)
    assert [supervised(tokenizer, each) for each in (first, last)] == [["1<end_of_turn>"], ["3<end_of_turn>"]]


@pytest.mark.parametrize("answer", ["\nhello", "\n\nhello", "hello"])
def test_a_span_that_begins_inside_a_token_is_tokenised_as_a_server_tokenises_the_question(answer):
    """The header's line break and that of the answer would be one token, which no server's prompt ends with."""
    tokenizer = byte_tokenizer(CHATML.special_tokens, merges=[("Ċ", "Ċ")], eos_token="<|im_end|>", chat_template=CHATML.template)
    document = one(tokenizer, chat(("u", "q"), ("a", answer), ("u", "again"), ("a", answer)))
    prompt = tokenizer("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    assert document.input_ids[: len(prompt)] == prompt
    assert not any(document.supervised[: len(prompt)])
    assert document.supervised[len(prompt)]
    assert supervised(tokenizer, document) == [f"{answer}<|im_end|>"] * 2
    assert tokenizer.decode(document.input_ids).count(f"assistant\n{answer}<|im_end|>\n") == 2


def test_both_of_two_tokens_that_end_a_turn_are_learnt_if_generation_stops_at_the_second():
    """As in Command R7B: generation does not stop at the first."""
    template = (
        "{% for message in messages %}{{ '<|start|>' + message['role'] + '<|text|>' + message['content'] }}"
        "{% if message['role'] == 'assistant' %}{{ '<|END_RESPONSE|>' }}{% endif %}{{ '<|END_OF_TURN|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant<|text|>' }}{% endif %}"
    )
    tokens = ("<|start|>", "<|text|>", "<|END_RESPONSE|>", "<|END_OF_TURN|>")
    tokenizer = byte_tokenizer(tokens, eos_token="<|END_OF_TURN|>", chat_template=template)
    record = chat(("u", "q"), ("a", "yes"), ("u", "and?"), ("a", "no"))
    (made,) = tokenize(tokenizer, [record], LossOn.ASSISTANT, stop_ids=(tokenizer.eos_token_id,))
    ends = "<|END_RESPONSE|><|END_OF_TURN|>"
    assert supervised(tokenizer, made) == [f"yes{ends}", f"no{ends}"]
