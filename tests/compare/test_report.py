"""The report of a comparison says what result.json says, and nothing that is not in it."""

import csv
import html
import json
import re
from pathlib import Path

import pytest

from sitvit.compare.cells import cells_of
from sitvit.compare.report import write_comparison
from sitvit.compare.tables import not_concluded

NUMBER = re.compile(r"(?<![\w.,-])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?!\w|\.\d)")


@pytest.fixture(scope="module")
def report(finished):
    """Each text of the report, as a reader sees it, and the JSON beside it."""
    written = write_comparison(finished, cells_of(finished))
    assert all(path.is_file() for path in written)
    folder = Path(finished.out)
    page = (folder / "report.html").read_text()
    seen = html.unescape(re.sub(r"(?s)<style>.*?</style>|<[^>]*>", " ", page))
    return seen, (folder / "report.md").read_text(), json.loads((folder / "result.json").read_text())


def forms(value: float, key: str) -> set[str]:
    """How a number of the JSON may be written: four digits, separators, or, of a share, a percentage."""
    if key == "changes":
        return {f"{100 * value:.3g}"}
    if key == "confidence":
        return {f"{100 * value:.4g}"}
    return {f"{value:.4g}", f"{value:,}", str(value)}


def gather(value, key: str, numbers: set[str], words: set[str]) -> None:
    """The numbers in all their forms, and all strings with a letter, names of keys among them."""
    if isinstance(value, dict):
        words.update(value)
        for inner, found in value.items():
            gather(found, "changes" if key == "changes" else inner, numbers, words)
    elif isinstance(value, list):
        for found in value:
            gather(found, key, numbers, words)
    elif isinstance(value, str):
        words.add(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        numbers.update(forms(value, key))


def numbers_in(body: str, result: dict) -> tuple[list[str], set[str]]:
    """Numbers of `body`, whose names and paths are no numbers, and those of `result` in all their forms."""
    known: set[str] = set()
    words: set[str] = set()
    gather(result, "", known, words)
    for word in sorted(words, key=len, reverse=True):
        if re.search("[A-Za-z]", word) and re.search("[0-9]", word):
            body = body.replace(word, " ")
    return [number.lstrip("+") for number in NUMBER.findall(body)], known


@pytest.mark.parametrize("which", [0, 1], ids=["page", "markdown"])
def test_every_number_of_the_report_is_in_the_json(report, which):
    seen, known = numbers_in(report[which], report[2])
    assert len(seen) > 150
    assert [number for number in seen if number not in known] == []


@pytest.mark.parametrize("which", [0, 1], ids=["page", "markdown"])
def test_a_number_that_is_not_the_one_of_the_json_is_noticed(report, which):
    """The check above can fail: its last digit changed, a number of three digits or more is not in the JSON.

    A tenth may by chance be another number of it.
    """
    seen, known = numbers_in(report[which], report[2])
    wrong = [
        number[: last.start()] + str((int(last[0]) + 1) % 10) + number[last.end() :]
        for number in seen
        if sum(map(str.isdigit, number)) >= 3 and (last := re.search(r"\d(?=(e|$))", number))
    ]
    assert len(wrong) > 60
    assert sum(number in known for number in wrong) < len(wrong) / 10


@pytest.mark.parametrize("part", ["differences", "values", "arms"])
def test_numbers_of_another_result_are_noticed_in_each_part(report, part):
    result = json.loads(json.dumps(report[2]), parse_float=lambda digits: 1.0371 * float(digits))
    for which in (0, 1):
        seen, known = numbers_in(report[which], {**report[2], part: result[part]})
        assert [number for number in seen if number not in known]


def test_the_tables_of_numbers_hold_them_unrounded(finished, report):
    result = report[2]
    with open(Path(finished.out) / "values.csv", newline="") as file:
        for row, value in zip(csv.DictReader(file), result["values"], strict=True):
            assert {name: float(row[name]) for name in value["metrics"]} == value["metrics"]
            assert (row["arm"], int(row["seed"]), int(row["step"])) == (
                value["arm"],
                value["seed"],
                value["step"],
            )
    with open(Path(finished.out) / "differences.csv", newline="") as file:
        for row, difference in zip(csv.DictReader(file), result["differences"], strict=True):
            assert float(row["mean"]) == difference["mean"]
            assert float(row["low"]) == difference["low"]
            assert row["verdict"] == difference["verdict"]


def test_the_page_is_one_file_with_its_pictures_described(finished, report):
    page = (Path(finished.out) / "report.html").read_text()
    assert "http" not in page
    assert not re.search(r"(src|href)=['\"](?!data:|#)", page)
    alts = re.findall(r"<img alt='([^']*)'", page)
    assert len(alts) == page.count("<img") == len(list((Path(finished.out) / "figures").glob("*.png")))
    assert all(len(alt.split()) > 3 for alt in alts)


def test_what_could_not_be_concluded_names_each_difference_that_is_not_separable(report):
    page, text, result = report
    for difference in result["differences"]:
        if difference["verdict"] == "not separable":
            line = f"{difference['second']} against {difference['first']} at step {difference['step']:,}"
            assert line in page.split("Not concluded")[-1]
            assert line in text.split("## Not concluded")[1]
    assert any(d["verdict"] == "not separable" for d in result["differences"]), "so that this can fail"


def test_the_compute_axis_is_steps_times_batch_times_the_training_flops_of_an_image(report):
    result = report[2]
    arms = {arm["name"]: arm for arm in result["arms"]}
    for value in result["values"]:
        arm = arms[value["arm"]]
        assert (
            value["training_flop"] == value["step"] * 8 * arm["training_flops"]
        )  # 8: the batch of the fixture
    assert arms["vanilla"]["changes"]["training_flops"] == 0
    assert arms["vit5"]["changes"]["training_flops"] == pytest.approx(
        arms["vit5"]["training_flops"] / arms["vanilla"]["training_flops"] - 1
    )


def test_arms_of_other_batches_are_told_not_to_be_paired(report):
    result = json.loads(json.dumps(report[2]))
    assert not any("same batches" in line for line in not_concluded(result))
    result["arms"][1]["config"]["train"]["batch_size"] += 1
    assert any("train.batch_size differ" in line for line in not_concluded(result))
