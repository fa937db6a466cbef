"""Expected speeds by budget, as lines of text for people. Prints nothing."""

from __future__ import annotations

from ondevice.measure.expected_speed import ExpectedSpeed, SpeedForecast
from ondevice.units import format_bytes


def speed_lines(forecast: SpeedForecast) -> list[str]:
    """A table of budgets with tokens per second, and a line on where the rates come from."""
    full_bytes = forecast.by_budget[-1].budget_bytes
    return [
        "tokens per second to expect at the start of a text, without drafts:",
        f"  {'budget':>10}{'of all':>8}{'tokens/s':>10}{'read a token':>14}{'context':>9}  mode",
        *(
            f"  {format_bytes(speed.budget_bytes):>10}{100 * speed.budget_bytes // full_bytes:>6} %"
            f"{_rate(speed):>10}{format_bytes(speed.flash_bytes_per_token):>14}{speed.max_context:>9}  "
            f"{speed.sparsity}"
            for speed in forecast.by_budget
        ),
        *(f"  {line}" for line in _rate_lines(forecast)),
    ]


def speed_words(forecast: SpeedForecast) -> str:
    """A sentence on the expected speed with the smallest budget, and with one that holds everything."""
    least, *_, full = forecast.by_budget * 2
    return (
        f"about {_rate(least)} tokens/s in {format_bytes(least.budget_bytes)}, and {_rate(full)} in "
        f"{format_bytes(full.budget_bytes)}, which hold everything"
    )


def _rate_lines(forecast: SpeedForecast) -> list[str]:
    rates = forecast.rates
    day = rates.flash_measured
    flash = f"{format_bytes(round(forecast.flash_bytes_per_second))}/s"
    multiply = f"{format_bytes(round(rates.multiply_bytes_per_second))}/s"
    return [
        f"flash gives {flash}: "
        + (f"measured {day[:10]}" if day else "taken from a typical device, as this one can't be measured"),
        f"DRAM gives {multiply} to the kernels on {rates.threads} threads: measured now, with 4-bit weights",
    ]


def _rate(speed: ExpectedSpeed) -> str:
    return (
        f"{speed.tokens_per_second:.2g}"
        if speed.tokens_per_second < 100
        else f"{speed.tokens_per_second:.0f}"
    )
