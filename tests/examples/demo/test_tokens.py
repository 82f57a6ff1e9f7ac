from examples.demo.tokens import CLS, SEP, Tokens, pad

TEXTS = ["Reads the configuration file.", "from_edgelist: a graph, from a list of edges"] * 4


def test_learning_is_repeatable():
    vocabularies = [Tokens.learn(TEXTS, 60).vocabulary() for _ in range(5)]
    assert all(vocabulary == vocabularies[0] for vocabulary in vocabularies)
    assert len(vocabularies[0]) == 60


def test_marks_truncation_and_padding():
    tokens = Tokens.learn(TEXTS, 120, max_length=10)
    (short,), (cut,) = tokens.ids(["graph"]), tokens.ids([TEXTS[1] * 9])
    assert (short[0], short[-1]) == (CLS, SEP)
    assert len(cut) == 10
    assert cut[-1] == SEP
    batch = pad([short, cut])
    assert batch["attention_mask"].sum(1).tolist() == [len(short), 10]
    assert batch["input_ids"][0, len(short) :].eq(0).all()
    assert batch["input_ids"][1].tolist() == cut


def test_words_and_pieces_see_the_same_part_of_a_text():
    tokens = Tokens.learn(TEXTS, 120)
    assert " ".join(tokens.words(TEXTS[1:2])[0]) == "from edgelist a graph from a list of edges"
    tokens.max_length = 6
    (pieces,), (words,) = tokens.pieces([TEXTS[1]]), tokens.words([TEXTS[1]])
    assert len(pieces) == 4
    assert "".join(pieces).replace("##", "") == "".join(words)
