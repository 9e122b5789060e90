"""Prose and code of our own that models are measured on: some 1,400 tokens, always the same."""

from __future__ import annotations

PASSAGES = (
    """\
The lighthouse at the northern end of the island had been without a keeper for eleven years when
the council decided to sell it. The lamp itself was no longer needed: ships found their way by
satellite, and the few fishermen who still went out in small boats knew every rock by heart. But the
tower stood on the highest point of the coast, its white paint flaking in long strips, and nobody
could imagine the place without it. So the advertisement in the newspaper was short. It gave the
height of the tower, the number of steps, and the price, which was lower than that of a used car.

Three people answered. The first was a man from the capital who wanted to build a hotel. He walked
around the tower twice, measured something with a device he did not explain, and left on the evening
ferry. The second was a painter who stayed for a week, slept in the old engine room, and made forty
sketches of the same cloud. She would have bought it, she said, if the wind had been quieter. The
third was a retired teacher of geography named Ellen, who had visited the island as a child and had
never forgotten the sound of the fog horn. She asked only one question, which was whether the horn
still worked. When they told her that it did not, she said that she would repair it.

The repair took most of the winter. The compressor had to be taken apart and cleaned, and two of the
valves were so badly corroded that new ones had to be made by the blacksmith in the village. Ellen
learned more about air pressure than she had taught in thirty years. In the last week of February,
on a morning so foggy that the gulls were walking, she opened the main valve and the horn sounded
for the first time in more than a decade. People came out of their houses. Some of them were crying,
although none of them could have said exactly why. The dogs did not like it at all.
""",
    """\
Bread is made from four things: flour, water, salt and time. The first three can be bought. The
fourth is the reason why so many people who try to bake at home are disappointed with the result.
Yeast works slowly when it is cold and quickly when it is warm, but quick is not the same as good.
While the dough rests, enzymes in the flour turn starch into sugar, and bacteria produce acids that
give the crust its flavour. None of this can be hurried. A dough that has rested overnight in the
refrigerator needs almost no kneading, because the long chains of gluten have had time to form by
themselves.

To make a simple loaf, mix 500 grams of flour with 350 grams of water, 10 grams of salt and 2 grams
of dry yeast. Stir until no dry flour is left, cover the bowl, and leave it alone for twelve to
eighteen hours. The next day, fold the dough a few times, shape it into a ball, and let it rise for
another hour. Heat the oven to 240 degrees Celsius with a heavy pot inside. Put the dough into the
hot pot, close the lid, and bake for thirty minutes. Then remove the lid and bake for fifteen
minutes more, until the crust is dark brown. The loaf is done when it sounds hollow if you knock on
the bottom. Wait at least one hour before you cut it, however difficult that may be.
""",
    """\
Why is the sky blue during the day and red in the evening? Sunlight contains all colours, and each
colour is a wave of a certain length. When light passes through the air, it meets molecules that are
much smaller than these waves. Short waves are scattered far more strongly than long ones: blue
light is scattered about five times as much as red. During the day we therefore see blue light
coming from every direction. In the evening, when the sun is low, its light has to travel through a
much thicker layer of air. Most of the blue has been scattered away before the light reaches us, and
what remains is orange and red. After the eruption of a large volcano, the sunsets can be especially
colourful, because fine particles in the upper atmosphere scatter the light in addition to the air
itself.
""",
    """\
The first bicycles had no pedals. A rider sat on a wooden beam between two wheels and pushed the
ground with his feet, and when the road went downhill he lifted them and hoped for the best. The
machine was invented after a summer without sun, when the harvest had failed and there was not
enough oats to feed the horses. People laughed at it. The police forbade it on the pavements of
several cities, because it frightened those who walked there. Half a century later somebody fixed
cranks to the front wheel, and since one turn of the cranks was one turn of the wheel, the wheel
grew larger and larger, until its rider sat as high as on a horse and fell as far. Only when a chain
drove the rear wheel could both wheels be small again. Air in the tyres came last. A veterinary
surgeon had watched his son bump over the cobbles on solid rubber, and glued together a tube from a
thin sheet of it, which he filled with a football pump. Within ten years nobody remembered how it
had been before. What had begun as a toy for gentlemen became the means by which a postman, a nurse
or a factory worker could live in one village and work in another, and more than one historian has
claimed that nothing did so much to mix the families of the countryside.
""",
    '''\
import heapq


def shortest_path(graph, start, goal):
    """Return the length of the shortest path from start to goal, or None if there is no path."""
    distances = {start: 0}
    queue = [(0, start)]
    while queue:
        distance, node = heapq.heappop(queue)
        if node == goal:
            return distance
        if distance > distances[node]:
            continue
        for neighbour, weight in graph[node].items():
            candidate = distance + weight
            if neighbour not in distances or candidate < distances[neighbour]:
                distances[neighbour] = candidate
                heapq.heappush(queue, (candidate, neighbour))
    return None


class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def __len__(self):
        return len(self.items)
''',
)
