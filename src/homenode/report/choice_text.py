"""ChoiceText: the published evidence behind a layout that an objective chose."""

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from homenode.plan.published import Choice
from homenode.report.terminal_text import AsciiWhereNeeded


def choice_text(choice: Choice) -> RenderableType:
    """Which layout, from which figures, and what they leave open."""
    vcpus = ", keeping the vCPUs" if choice.keep_vcpus else ""
    parts: list[RenderableType] = [
        Text(""),
        Text("Why this layout", style="bold underline"),
        Text(f"{choice.layout.name}{vcpus}, from published figures; nothing was measured here."),
    ]
    parts += [Padding(Text(sentence), (0, 0, 0, 2), expand=False) for sentence in choice.evidence]
    parts += [
        Padding(Text(f"doubt: {sentence}", style="yellow"), (0, 0, 0, 2), expand=False)
        for sentence in choice.doubts
    ]
    return AsciiWhereNeeded(Group(*parts))
