"""Topics of `Node`: the container image that the user asks about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpunode.facts.about_engines import AboutEngines
from gpunode.facts.topic import topic

if TYPE_CHECKING:
    from gpunode.facts.images import Search


class AboutImages(AboutEngines):
    """See `Node`."""

    @topic
    def image(self) -> Search:
        """The image of `Questions.image` in an engine's store; nobody holds the empty name."""
        from gpunode.facts.images import Search, find_image

        return find_image(self, self.questions.image) if self.questions.image else Search(None)
