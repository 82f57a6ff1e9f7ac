"""Pairs of real texts without a download, from Python's own documentation; put yours here."""

import importlib
import inspect
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sparse_losses.functional import recall_at_k

# As in the chapters of Python's library reference.
CHAPTERS = {
    "text": "string re difflib textwrap",
    "dates": "datetime calendar time",
    "numbers": "math cmath fractions decimal statistics random",
    "collections": "collections bisect copy enum itertools functools",
    "files": "os shutil tempfile glob pathlib fileinput",
    "formats": "csv json configparser zipfile tarfile gzip pickle",
    "network": "urllib.parse urllib.request http.client http.cookies smtplib socket ipaddress",
    "processes": "threading subprocess queue sched asyncio",
    "programs": "logging argparse inspect ast dis traceback warnings unittest",
}

# Questions and the passages that answer them.
KOREAN = [
    (
        "서울에서 부산까지 기차로 얼마나 걸리나요",
        "KTX를 타면 서울역에서 부산역까지 두 시간 반쯤 걸린다.",
    ),
    ("김치는 왜 시어지나요", "김치가 익는 동안 유산균이 젖산을 만들기 때문에 신맛이 난다."),
    ("한글은 누가 만들었나요", "세종대왕이 1443년에 훈민정음을 창제하고 1446년에 반포했다."),
    ("제주도에서 가장 높은 산", "한라산은 해발 1,947미터로 남한에서 가장 높은 산이다."),
    ("여권을 잃어버렸을 때", "해외에서 여권을 분실하면 가까운 대사관이나 영사관에 신고해야 한다."),
    ("감기에 걸렸을 때 좋은 음식", "따뜻한 국물과 생강차는 목의 통증을 덜어 준다."),
    ("전세와 월세의 차이", "전세는 보증금을 맡기고, 월세는 매달 집세를 낸다."),
    ("연말정산은 언제 하나요", "직장인은 이듬해 1월과 2월에 회사를 통해 소득세를 정산한다."),
    ("떡볶이 만드는 법", "떡과 어묵을 고추장 양념에 넣고 국물이 걸쭉해질 때까지 끓인다."),
    ("자전거 타이어 공기압", "도로용 자전거의 타이어에는 옆면에 적힌 압력만큼 바람을 넣는다."),
    ("비밀번호를 안전하게 보관하려면", "비밀번호 관리 프로그램을 쓰고 두 단계 인증을 켜 둔다."),
    ("경주에서 볼 만한 곳", "불국사와 석굴암은 신라 시대의 대표적인 문화유산이다."),
    ("커피를 마시면 잠이 안 오는 이유", "카페인은 졸음을 일으키는 아데노신의 작용을 막는다."),
    ("지진이 났을 때 행동 요령", "흔들림이 멈출 때까지 탁자 아래로 들어가 머리를 보호한다."),
    ("운전면허 갱신 기간", "면허증에 적힌 기간 안에 적성 검사를 받고 면허를 갱신한다."),
    ("장마는 언제 시작하나요", "우리나라의 장마는 대개 6월 하순에 시작해 7월 하순에 끝난다."),
    ("도서관에서 책을 빌리려면", "회원증을 만들면 한 번에 다섯 권까지 두 주 동안 빌릴 수 있다."),
    (
        "고양이가 물을 안 마셔요",
        "물그릇을 여러 곳에 두거나 흐르는 물을 주면 고양이가 물을 더 마신다.",
    ),
    ("주식 배당금은 언제 받나요", "배당금은 주주 총회가 끝난 뒤 한 달 안에 계좌로 들어온다."),
    ("태권도의 기본 동작", "태권도는 서기, 막기, 지르기, 차기를 바탕으로 한다."),
]


def documented() -> Iterator[tuple[str, str, list[str]]]:
    """Name, documentation and labels (chapter, module, kind) of functions and classes."""
    seen = set()
    for chapter, modules in CHAPTERS.items():
        for module in map(importlib.import_module, modules.split()):
            for name, value in inspect.getmembers(module, callable):
                text = " ".join((inspect.getdoc(value) or "").split())
                if len(text) > 60 and not name.startswith("_") and text not in seen:
                    seen.add(text)
                    kind = "class" if inspect.isclass(value) else "function"
                    labels = [chapter, module.__name__, kind]
                    yield name.replace("_", " ").lower(), text[:600], labels


def pairs() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Pairs of a name and what it does: four fifths to train on, one fifth held out."""
    rows = [(name, text) for name, text, _ in documented()]
    held_out = rows[::5]
    return [row for row in rows if row not in held_out], held_out


def batches(rows: Sequence[Any], size: int, steps: int) -> Iterator[tuple[list[Any], ...]]:
    """Random batches, as lists of the rows' columns; no row is twice in a batch."""
    generator = random.Random(0)
    for _ in range(steps):
        yield tuple(map(list, zip(*generator.sample(list(rows), size), strict=True)))


def recall(encoder: Any, rows: Sequence[tuple[str, str]], k: int = 10) -> float:
    """Recall@k of the rows' queries among the rows' documents, by dot products."""
    queries, documents = map(list, zip(*rows, strict=True))
    vectors = encoder.encode_query(queries, output="dense")
    scores = vectors @ encoder.encode_document(documents, output="dense").T
    return recall_at_k(scores, torch.arange(len(rows)), k=k).item()


# --8<-- [start:ndcg]
def ndcg(scores: torch.Tensor, grades: torch.Tensor, k: int = 10) -> float:
    """nDCG@k of scores `[Q, D]`; grades `[Q, D]` are 0 where a document is not relevant."""
    discount = 1 / torch.arange(2, k + 2).log2()
    gained = grades.gather(1, scores.topk(k).indices) @ discount
    return (gained / (grades.topk(k).values @ discount)).mean().item()


# --8<-- [end:ndcg]
