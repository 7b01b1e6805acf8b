# ruff: noqa: SIM905  (words in a row read better than a list of quoted ones)
"""Word pools of the corpus. Plain data; the evaluation holds its own words."""

from __future__ import annotations

NAMES = (
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Karl Laura Maria Nina Oscar Paul Rosa Sam Tina Victor "
    "Wendy Zoe Ali Aisha Chen Diego Elena Fatima Hiro Ivan Jin Kofi Leila Mei Noor Omar Priya Ravi Sofia Tomas "
    "Yuki Amir Bob Alice Carol Dan Eva Frank Gina Hugo Iris Joe Kate Leo Mia Nora Peter Ruth Simon Tom Uma Vera "
    "Will Lucy Max Ella John Mary James Linda"
).split()
CITIES = (
    "Paris London Berlin Madrid Rome Vienna Oslo Tokyo Lima Cairo Delhi Boston Chicago Dublin Prague Athens "
    "Lisbon Zurich Seoul Sydney Toronto Nairobi Lagos Munich Hamburg Milan Geneva Warsaw Budapest Moscow Beijing "
    "Shanghai Mumbai Denver Seattle"
).split()
COLOURS = "red blue green yellow orange purple pink brown black white grey silver gold turquoise violet".split()
FRUITS = "apple banana cherry mango orange pear grape lemon peach plum kiwi melon fig lime apricot".split()
ANIMALS = "cat dog horse rabbit parrot hamster goat cow sheep lion tiger bear wolf fox owl".split()
FOODS = "pizza pasta soup rice bread cheese salad curry noodles pancakes sushi tacos chocolate cake".split()
HOBBIES = "chess painting running reading cooking swimming hiking gardening music dancing cycling photography".split()
JOBS = (
    "teacher doctor engineer nurse baker pilot farmer painter writer lawyer driver student scientist gardener"
).split()
COUNTRIES = (
    "Spain Norway Japan Brazil Canada Kenya India Italy Chile Greece Poland Egypt France Germany Mexico"
).split()
VEGETABLES = "carrot potato onion tomato pepper cabbage spinach pea leek radish bean pumpkin".split()
PLANETS = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
LANGUAGES = "Python Rust Java Go C Ruby Swift Kotlin Haskell Lua Perl Julia".split()
NOUNS = (
    "table river window garden music train engine paper light cloud stone bridge market school house letter book "
    "road island forest machine kitchen mirror clock candle bottle basket ladder ticket pencil server token model "
    "block queue stream cache"
).split()
VERBS = "runs sleeps sings waits jumps smiles works plays reads walks dances shines falls grows".split()
ADJECTIVES = (
    "small big old new quick slow happy quiet bright dark warm cold soft strong clever brave lazy kind"
).split()
NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()

GROUPS: dict[str, list[str]] = {
    "colours": COLOURS, "colors": COLOURS, "fruits": FRUITS, "animals": ANIMALS, "cities": CITIES[:15], "foods": FOODS,
    "hobbies": HOBBIES, "jobs": JOBS, "countries": COUNTRIES, "vegetables": VEGETABLES, "planets": PLANETS,
    "programming languages": LANGUAGES, "names": NAMES[:15], "months": MONTHS, "days of the week": DAYS,
}  # fmt: skip

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Spain": "Madrid", "Italy": "Rome", "Austria": "Vienna", "Norway":
    "Oslo", "Sweden": "Stockholm", "Denmark": "Copenhagen", "Finland": "Helsinki", "Poland": "Warsaw", "Greece":
    "Athens", "Portugal": "Lisbon", "Ireland": "Dublin", "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi",
    "Egypt": "Cairo", "Kenya": "Nairobi", "Peru": "Lima", "Canada": "Ottawa", "Brazil": "Brasilia", "Chile":
    "Santiago", "Australia": "Canberra", "Hungary": "Budapest", "Belgium": "Brussels", "England": "London",
    "Russia": "Moscow", "South Korea": "Seoul", "Mexico": "Mexico City", "the Netherlands": "Amsterdam", "Turkey":
    "Ankara", "Switzerland": "Bern", "Argentina": "Buenos Aires", "Cuba": "Havana", "the United States":
    "Washington"
}  # fmt: skip

OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "old": "new", "happy": "sad", "light": "dark", "up": "down",
    "open": "closed", "early": "late", "hard": "soft", "high": "low", "long": "short", "rich": "poor", "full":
    "empty", "wet": "dry", "clean": "dirty", "strong": "weak", "day": "night", "yes": "no", "left": "right", "true":
    "false"
}  # fmt: skip
