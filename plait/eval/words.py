"""The small world that plait-tiny knows: every word of its tasks."""

from __future__ import annotations

NAMES = (
    "Alice", "Anna", "Ben", "Bob", "Clara", "Dan", "David", "Emma", "Eva", "Frank", "Fred", "Gina",
    "Grace", "Hugo", "Ivan", "Jack", "Julia", "Karen", "Leo", "Lena", "Maria", "Mark", "Nina", "Nora",
    "Oscar", "Otto", "Paul", "Peter", "Rita", "Rosa", "Sam", "Sara", "Steve", "Tina", "Tom", "Uma",
    "Vera", "Victor", "Will", "Zoe",
)  # fmt: skip
CITIES = (
    "Athens", "Berlin", "Boston", "Cairo", "Delhi", "Dublin", "Geneva", "Hanoi", "Helsinki", "Lagos",
    "Lima", "Lisbon", "London", "Madrid", "Miami", "Milan", "Moscow", "Nairobi", "Naples", "Oslo",
    "Paris", "Prague", "Quito", "Rome", "Seoul", "Sydney", "Tokyo", "Toronto", "Vienna", "Warsaw",
)  # fmt: skip
COLORS = (
    "red", "blue", "green", "yellow", "black", "white", "purple", "orange", "pink", "brown", "gray",
    "silver", "gold", "beige", "violet", "crimson", "indigo", "ivory", "olive", "teal",
)  # fmt: skip
FOODS = (
    "pizza", "pasta", "rice", "soup", "bread", "cheese", "apples", "grapes", "cake", "fish", "salad",
    "beans", "cherries", "honey", "lemons", "melons", "noodles", "nuts", "pears", "plums", "tomatoes",
    "waffles",
)  # fmt: skip
PETS = (
    "dog", "cat", "horse", "parrot", "rabbit", "turtle", "snake", "goat", "hamster", "duck", "lizard",
    "donkey", "goose", "mouse", "pony", "ferret", "frog", "pigeon", "sheep", "spider",
)  # fmt: skip
THINGS = (
    "anchor", "basket", "bell", "bottle", "bridge", "button", "candle", "carpet", "chair", "clock",
    "coin", "compass", "crown", "desk", "drum", "engine", "feather", "flute", "guitar", "hammer",
    "island", "jacket", "kettle", "kiwi", "ladder", "lamp", "magnet", "marble", "mirror", "needle",
    "ocean", "paper", "pencil", "piano", "pillow", "pocket", "rocket", "saddle", "scissors", "shovel",
    "spoon", "table", "thunder", "ticket", "tiger", "tunnel", "umbrella", "velvet", "violin", "wallet",
    "whistle", "window", "winter", "wizard", "zebra",
)  # fmt: skip
PLACES = (
    "attic", "balcony", "bathroom", "bedroom", "cellar", "garage", "garden", "hallway", "kitchen",
    "library", "office", "park", "pool", "school", "station", "workshop",
)  # fmt: skip
WEATHERS = ("sunny", "rainy", "cloudy", "windy", "foggy", "stormy")

WORDS = NAMES + CITIES + COLORS + FOODS + PETS + THINGS

KINDS = {"city": CITIES, "color": COLORS, "food": FOODS, "pet": PETS, "word": WORDS}
"""What a name may be said to have, and the values it may take; "code" beside these takes four digits."""

SUBJECTS = (
    "the sky", "the river", "the old house", "the train", "the market", "the small boat", "the road",
    "the teacher", "the mountain", "the new bus", "the lake", "the long meeting", "the big tree", "the door",
    "the red car", "the quiet street", "the shop", "the first letter", "the tall man", "the music",
)  # fmt: skip
STATES = (
    "was quiet", "looks nice", "is open", "is far away", "was cold", "seems new", "is busy", "was late",
    "is very old", "looks empty", "is ready", "was closed", "seems slow", "is too loud",
    "was lost", "is here",
)  # fmt: skip
TIMES = (
    "today", "in the morning", "at night", "again", "this week", "near the lake", "after lunch", "in summer",
    "for now", "since noon", "all day", "on Monday",
)  # fmt: skip
