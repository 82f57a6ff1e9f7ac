import random

from examples.demo.corpus import Pair, Row

TINY = {"batch_size": 8, "vocab_size": 400, "start_active": 40}
TOPICS = {
    "graph": "node edge path shortest weight neighbour cycle tree vertex connected",
    "matrix": "row column inverse determinant rank eigenvalue diagonal transpose norm trace",
    "file": "open read write close folder name copy delete line encoding",
    "date": "year month day hour zone parse format week calendar second",
}


def make_rows(count: int = 240) -> list[Row]:
    """Short texts on four topics, with the query's words scattered in the text."""
    rng = random.Random(5)
    rows = []
    for number in range(count):
        topic = rng.choice(sorted(TOPICS))
        words = TOPICS[topic].split()
        shared = rng.sample(words, 2)
        text = " ".join([*rng.sample(words, 5), *shared, f"x{number}", "of the", topic])
        name = f"{' '.join(shared)} x{number}"
        pairs = (Pair(0, name, text), Pair(1, f"the {topic} {shared[0]} x{number}", text))
        rows.append(Row(name, name, pairs, text))
    return rows
