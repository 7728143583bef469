"""The block pool of vLLM V1 as its rule is worded: one list of free blocks, served at its head."""


class ListPool:
    """Blocks `first .. first + size - 1`; every block has a count and perhaps a key."""

    def __init__(self, size: int, first: int) -> None:
        self.free = list(range(first, first + size))
        self.count = dict.fromkeys(self.free, 0)
        self.key: dict[int, int] = {}
        self.labelled: list[int] = []

    @property
    def used(self) -> int:
        return sum(count > 0 for count in self.count.values())

    def find(self, key: int) -> int | None:
        return next((block for block in self.labelled if self.key[block] == key), None)

    def take_many(self, number: int) -> list[int]:
        taken, self.free = self.free[:number], self.free[number:]
        for block in taken:
            self.count[block] = 1
            if block in self.key:
                del self.key[block]
                self.labelled.remove(block)
        return taken

    def label(self, blocks: list[int], keys: list[int]) -> None:
        for block, key in zip(blocks, keys, strict=True):
            self.key[block] = key
            self.labelled.append(block)

    def hit(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.count[block] == 0:
                self.free.remove(block)
            self.count[block] += 1

    def drop_table(self, table: list[int]) -> None:
        blank = []
        for block in reversed(table):
            self.count[block] -= 1
            if self.count[block] == 0:
                if block in self.key:
                    self.free.append(block)
                else:
                    blank.append(block)
        self.free = blank + self.free
