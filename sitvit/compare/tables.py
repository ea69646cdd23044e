"""A comparison's result in words and tables: every number is one of result.json, rounded to four digits."""

from __future__ import annotations

from typing import Any

Result = dict[str, Any]
Table = tuple[str, list[str], list[list[str]], int]
"""What it is, the head, the rows, and how many columns from the left are text."""


def headline(result: Result) -> list[str]:
    """What each pair differs by at the last step that it has, unguided and at the best guidance."""
    told = []
    for first, second in dict.fromkeys((d["first"], d["second"]) for d in result["differences"]):
        entries = [d for d in result["differences"] if (d["first"], d["second"]) == (first, second)]
        last = max(d["step"] for d in entries)
        told += [_sentence(result, d) for d in entries if d["step"] == last]
    if result["ladder"] and len(result["ladder"]["rungs"]) > 1:
        unguided = {"first_cfg_scale": 1, "second_cfg_scale": 1, "step": result["ladder"]["step"]}
        told.append(f"All together: {_sentence(result, {**unguided, **result['ladder']['whole']})}")
    return told


def _sentence(result: Result, d: dict[str, Any]) -> str:
    where = f"{d['second']} against {d['first']}, step {d['step']:,}, {scales(d)}"
    by = f"{result['metric']} {signed(d['mean'])}"
    if d["low"] is None:
        return f"{where}: {by}, and nothing says how far that can be trusted."
    if d["num_seeds"] == 1:
        return (
            f"{where}: {by} ({interval(d['low'], d['high'])} by its samples) on the one seed that both have."
        )
    by += f" ({interval(d['low'], d['high'])} at {percent(result['confidence'])} %, seeds: {d['num_seeds']})"
    verdict = {"lower": "better beyond chance", "higher": "worse beyond chance"}
    return f"{where}: {by}: {verdict.get(d['verdict'], 'not separable from no difference')}."


def not_concluded(result: Result) -> list[str]:
    """What could not be concluded, and what limits what was."""
    told = []
    for d in result["differences"]:
        what = f"{d['second']} against {d['first']} at step {d['step']:,}, {scales(d)}"
        if d["verdict"] == "not separable":
            told.append(f"{what}: the interval {interval(d['low'], d['high'])} holds zero.")
        elif d["verdict"] == "unknown":
            told.append(f"{what}: one seed and no spread of its samples, so no interval.")
    told += _other_streams(result)
    if any(d["num_seeds"] == 1 for d in result["differences"]):
        told.append("An interval of one seed has the spread of the samples in it, and not that of training.")
    if result["num_judged"]:
        told.append(
            f"{result['num_judged']} differences are judged, each at {percent(result['confidence'])} %: were "
            f"none of them real, {shown(result['expected_false_alarms'])} would still be expected to look so."
        )
    if any(arm["best_cfg_scale"] for arm in result["arms"]):
        told.append(
            "Each arm's best guidance was chosen on the images that it is reported on, so it flatters."
        )
    if result["metric"] != "FID":
        told.append(f"{result['metric']} is not FID: it compares only with itself, at one number of images.")
    if result["references"]:
        told.append(
            "Published values come from others' code and protocol: they are drawn, and never counted in."
        )
    told.append("What holds here need not hold for other data, sizes, recipes or longer training.")
    if result["missing"]:
        named = "; ".join(result["missing"][:6]) + ("; and more" if len(result["missing"]) > 6 else "")
        told.append(f"{result['num_missing']} of {result['num_cells']} cells are not finished: {named}.")
    return told


def _other_streams(result: Result) -> list[str]:
    """Pairs whose arms were trained on other data or batches, so that their training is not paired."""
    settings = {
        arm["name"]: {
            "train.batch_size": arm["config"]["train"]["batch_size"],
            **{f"data.{key}": value for key, value in arm["config"]["data"].items()},
        }
        for arm in result["arms"]
    }
    told = []
    for first, second in dict.fromkeys((d["first"], d["second"]) for d in result["differences"]):
        one, two = settings[first], settings[second]
        differ = [key for key in one if one[key] != two[key]]
        if differ:
            told.append(
                f"{second} against {first}: {', '.join(differ)} differ, so they did not train on the same "
                "batches and noise; their difference holds that too."
            )
    return told


def tables(result: Result) -> dict[str, Table]:
    """By the name of the section that shows them; those without rows are there too."""
    return {
        "differences": _differences(result),
        "ladder": _ladder(result),
        "cost": _cost(result),
        "arms": _arms(result),
        "values": _values(result),
        "references": _references(result),
    }


def protocol(result: Result) -> tuple[str, list[list[str]]]:
    """Its name, and what all evaluations have in common: what is set, not what is off."""
    rows = [[key, str(value)] for key, value in result["protocol"].items() if value is not None]
    return "Protocol", rows


def _differences(result: Result) -> Table:
    rows = [
        [d["second"], d["first"], f"{d['step']:,}", scales(d), signed(d["mean"]),
         interval(d["low"], d["high"]), interval(d["bootstrap_low"], d["bootstrap_high"]),
         str(d["num_seeds"]), d["verdict"]]
        for d in result["differences"]
    ]  # fmt: skip
    head = ["arm", "against", "step", "guidance", "difference", f"{percent(result['confidence'])} % interval"]
    name = f"Paired differences in {result['metric']} (below zero: the arm is better)"
    return name, [*head, "bootstrap", "seeds", "verdict"], rows, 2


def _ladder(result: Result) -> Table:
    ladder = result["ladder"]
    rows = []
    if ladder:
        for rung in [*ladder["rungs"], ladder["whole"]]:
            change = [signed(rung["mean"]), interval(rung["low"], rung["high"]), rung["verdict"]]
            rows.append([rung["second"], rung["first"], shown(ladder["means"][rung["second"]]), *change])
    name = "The ladder; the last line is all parts together"
    return name, ["arm", "against", result["metric"], "difference", "interval", "verdict"], rows, 2


def _cost(result: Result) -> Table:
    rows = []
    for arm in result["arms"]:
        changes, time = arm["changes"], arm["changes"]["seconds_a_step"]
        rows.append(
            [arm["name"], arm["against"], f"{arm['parameters']:,}", change(changes["parameters"]),
             f"{arm['training_flops']:,}", change(changes["training_flops"]), shown(arm["seconds_a_step"]),
             change(time["mean"]) if time else "-",
             f"{change(time['lowest'])} to {change(time['highest'])}" if time else "-",
             f"{arm['memory_bytes']:,}", change(changes["memory_bytes"]),
             f"{arm['gpu_memory_bytes']:,}" if arm["gpu_memory_bytes"] else "-"]
        )  # fmt: skip
    head = ["arm", "held against", "parameters", "change", "training FLOPs an image", "change"]
    head += ["s a step, measured", "change, measured", "over seeds", "bytes in training", "change"]
    return "Cost", [*head, "GPU bytes, measured"], rows, 2


def _arms(result: Result) -> Table:
    rows = [
        [arm["name"], arm["model"], arm["file"], " ".join(arm["overrides"]) or "-"] for arm in result["arms"]
    ]
    return "Arms", ["arm", "network", "experiment file", "overrides"], rows, 4


def _values(result: Result) -> Table:
    rows = [
        [v["arm"], str(v["seed"]), f"{v['step']:,}", f"{v['cfg_scale']:g}", f"{v['training_flop']:.4g}",
         *(shown(number) for number in v["metrics"].values())]
        for v in result["values"]
    ]  # fmt: skip
    head = ["arm", "seed", "step", "cfg", "training FLOP", *result["values"][0]["metrics"]]
    return "Every value", head, rows, 1


def _references(result: Result) -> Table:
    rows = [
        [r["arm"], r["source"], f"{r['step']:,}", f"{r['cfg_scale']:g}", shown(r["value"])]
        for r in result["references"]
    ]
    return "Published, by others", ["arm", "source", "step", "cfg", "value"], rows, 2


def scales(d: dict[str, Any]) -> str:
    """The guidance of a difference's two sides."""
    one, two = d["first_cfg_scale"], d["second_cfg_scale"]
    if one == two == 1:
        return "unguided"
    return f"cfg {two:g}" if one == two else f"cfg {two:g} against {one:g}"


def shown(value: float | None) -> str:
    """Four digits."""
    return "-" if value is None else f"{value:.4g}"


def signed(value: float) -> str:
    """Four digits with a sign."""
    return f"{value:+.4g}"


def interval(low: float | None, high: float | None) -> str:
    """Both ends."""
    return "-" if low is None or high is None else f"{signed(low)} to {signed(high)}"


def percent(share: float) -> str:
    """A share as a percentage."""
    return f"{100 * share:.4g}"


def change(share: float) -> str:
    """A relative change as a signed percentage."""
    return f"{100 * share:+.3g} %"
