# ruff: noqa: E501  (one phrase list or case per line reads better than wrapped ones)
"""What the tools of the training text are for: weather, timers, prices and so on; how users ask for them, what they
reply.

Plain data. Names, purposes and ways to ask are patterns (`source.py`). Independent of how a chat with tools goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .dialogue import pseudo_word
from .source import Source
from .tasks import full_name
from .words import ADJECTIVES, CITIES, COLOURS, DAYS, FOODS, NAMES, NOUNS

Values = dict[str, Any]


@dataclass(frozen=True)
class Domain:
    """A kind of tool: possible names and purposes, parameters as {slot: (possible parameter names, JSON type)}, user frames, reply and answer.

    `draw` gives a value for each slot; `reply` gives the tool's result; `answer` puts both into words.
    """

    names: tuple[str, ...]
    purposes: tuple[str, ...]
    parameters: dict[str, tuple[tuple[str, ...], str]]
    frames: tuple[str, ...]
    draw: Callable[[Source], Values]
    reply: Callable[[Source, Values], Values]
    answer: str


def place(rng: Source) -> str:
    roll = rng.random()
    if roll < 0.5:
        return rng.value(CITIES)
    word = pseudo_word(rng, rng.choice((2, 3))).capitalize()
    return f"{rng.choice(_PLACE_PARTS)} {word}" if roll < 0.65 else word


def person(rng: Source) -> str:
    if rng.random() < 0.12:
        return full_name(rng)
    return rng.value(NAMES) if rng.random() < 0.6 else pseudo_word(rng, 2).capitalize()


def item(rng: Source) -> str:
    return rng.value((*NOUNS, *FOODS)) if rng.random() < 0.6 else pseudo_word(rng, 2)


_PLACE_PARTS = ("New", "San", "Saint", "Port", "Bad", "Los", "Fort", "Mount", "East", "Upper", "Old")
_SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear")

DOMAINS = (
    Domain(
        ("[get_|fetch_|current_|find_|show_|check_]weather", "weather_(lookup|report|now|info|forecast)", "get_current_weather", "getWeather", "get_weather_(for_city|at|in)"),
        ("(Get|Find|Returns|Show|Look up|Tells) the[ current] weather (of|in|at|for) a (place|city|location|town)", "[Current |Today's ]weather (in|of|at) a (city|place|town)", "Weather (report|data|information|forecast) (for|of) a (location|city|place)", "(Look up|Tells|Find out) how the weather is"),
        {"place": (("city", "location", "place", "city_name"), "string")},
        ("(What is|What's|How is|Tell me|Show me|Check|Get|I need) the[ current] weather[ like] (in|for|at) {place}[ today| now| right now| at the moment|, please]?", "[Current |Today's ]weather (in|for|of|at) {place}[, please| now| today]?", "weather {place}", "{place} weather[ today| now]", "Is it (raining|snowing|cold|warm|sunny|windy|hot|cloudy) in {place}[ today| now| right now]?", "How (warm|cold|hot|wet|windy) is it in {place}[ today| now| right now]?", "(What is|What's|Tell me) the temperature (in|at|of) {place}[ today| now]?", "Will (I|we) need (an umbrella|a coat|boots|a hat) in {place}[ today]?", "Do (I|we) need (an umbrella|a coat|boots|a hat) in {place}[ today]", "(How is it|What is it like) outside in {place}[ today| now]?", "(Give|Send|Show) me a weather report (for|of|from) {place}.", "Does it (rain|snow) in {place}[ today| now]?", "(What will|How will) the weather in {place} be[ today| tonight| this evening]?", "(Can|Could) you[ please] (tell me|check|look up|get) the weather (in|for|of) {place}?"),
        lambda rng: {"place": place(rng)},
        lambda rng, v: {"temperature": rng.number(-9, 38), "sky": rng.choice(_SKIES)},
        "In {place} it is {sky}, {temperature} degrees.",
    ),
    Domain(
        ("[get_|current_|local_|show_|tell_|check_]time", "get_(current|local)_time", "(clock|time_now|time_in|time_of_day|getTime|world_clock)"),
        ("(Get|Find|Tells|Returns|Show|Look up) the[ current| local] time[ in a place| of a city| at a location]", "(Current|Local|Present)[ local] time (of|in) a (city|place)", "(World clock|Clock of a place|What the clock says)"),
        {"place": (("city", "location", "timezone", "place"), "string")},
        ("What time is it[ now| right now] in {place}[ now]?", "(What is|What's|Tell me|Give me|Show me|Get|I need|Check) the[ current| local] time (in|at|for|of) {place}[ now|, please]?", "(Current|Local|The) time (in|of|at) {place}[, please]?", "[Tell me ]how late is it[ now] in {place}[ now]", "(Which|What) time is it[ now] in {place}?", "What does the clock (say|show) in {place}[ now]?", "(Do you know|Can you tell me|Could you tell me) the[ current| local] time (in|at) {place}?", "time[ now] in {place}", "{place} time[ now]", "(Is it|Is it still) (day|night|morning|evening|late) in {place}?"),
        lambda rng: {"place": place(rng)},
        lambda rng, v: {"time": f"{rng.randint(0, 23)}:{rng.randint(10, 59)}"},
        "It is {time} in {place}.",
    ),
    Domain(
        ("add[_numbers|_two_numbers|_integers|_values|er|ition]", "sum[_numbers|_up|_of|_two]", "(plus|calculate_sum|compute_sum|get_sum|total|math_add)"),
        ("(Add|Adds|Sum|Sums)[ up][ two] (numbers|integers|values)", "(Sum|Total|Addition) of[ two] (integers|numbers|values)", "(Compute|Calculate|Returns|Get) (a|the) (sum|total)[ of two numbers]", "(First|One number) plus (second|another)"),
        {"x": (("a", "x", "first", "left"), "integer"), "y": (("b", "y", "second", "right"), "integer")},
        ("(What is|What's|How much is|Tell me|And) {x} (plus|+|and) {y}?", "[Please ]Add {x} (and|to|plus|with) {y}[ please| for me].", "[Please ](Calculate|Compute|Work out|Solve) {x} (+|plus) {y}.", "[The |What is the |Give me the |I need the ](sum|total) of {x} and {y}[, please]?", "What (do|does) {x} and {y} (add up to|make|give)[ together]?", "{x} (+|plus) {y}[ =]", "(Sum|Sum up|Total)[ of] {x} and {y}.", "(Can|Could) you[ please] (add|sum) {x} and {y}?", "How much (do|does) {x} (and|plus) {y} make?", "{x} and {y} together"),
        lambda rng: {"x": rng.number(1, 999), "y": rng.number(1, 999)},
        lambda rng, v: {"result": v["x"] + v["y"]},
        "The result is {result}.",
    ),
    Domain(
        ("multiply[_numbers|_two_numbers|_integers|_values]", "(times|product|get_product|multiplication|math_multiply|compute_product|product_of)"),
        ("(Multiply|Multiplies)[ two] (numbers|integers|values)", "(Product|Multiplication) of[ two] (integers|numbers|values)", "(Compute|Calculate|Returns|Get) (a|the) product[ of two numbers]", "(First|One number) times (second|another)"),
        {"x": (("a", "x", "first", "left"), "integer"), "y": (("b", "y", "second", "right"), "integer")},
        ("(What is|What's|How much is|Tell me|And) {x} (times|*|multiplied by) {y}?", "[Please ]Multiply {x} (by|with|and|times) {y}[ please| for me].", "[Please ](Calculate|Compute|Work out|Solve) {x} (*|times) {y}.", "[The |What is the |Give me the |I need the ]product of {x} and {y}[, please]?", "{x} (*|times|x) {y}[ =]", "(Can|Could) you[ please] multiply {x} (by|and|with) {y}?", "How much (do|does) {x} times {y} make?"),
        lambda rng: {"x": rng.number(2, 99), "y": rng.number(2, 99)},
        lambda rng, v: {"result": v["x"] * v["y"]},
        "The result is {result}.",
    ),
    Domain(
        ("[web_|internet_|online_|page_]search[_web|_pages|_engine|_online]", "(find|lookup|look_up|find_pages|query_web|google|search_for)"),
        ("Search (the web|the internet|pages|online|for something)", "(Find|Finds|Get) (pages|results|documents|websites) (about|for) a (text|topic|query)", "(Web|Internet|Online) search", "(Look|Looks) (something|things) up[ online| on the web]"),
        {"text": (("query", "q", "text", "keywords"), "string")},
        ("[Please ](Search|Look|Google)[ the web| online| the internet] for {text}[ please].", "[Please ]Look up {text}[ online| on the web| for me].", "[Please ]Find[ me] (something about|pages about|results for|) {text}[ online].", "(Can|Could) you[ please] (search for|look up|find|google) {text}?", "(google|search|find) {text}", "(Do|Make|Run|Start) a[ web] search (for|about|on) {text}.", "What does the (web|internet) say about {text}?", "What can you find (about|on) {text}?", "I (want|need|am looking for) (pages|results|something) about {text}."),
        lambda rng: {"text": f"{rng.value(ADJECTIVES)} {item(rng)}"},
        lambda rng, v: {"results": rng.number(0, 99)},
        "I found {results} results for {text}.",
    ),
    Domain(
        ("send_(email|message|mail|text|note)", "(message|mail|email|write_message|write_mail|deliver_message|notify|tell_person|post_message)"),
        ("(Send|Sends) a (message|text|note|mail) to (a person|somebody|someone)", "(Write|Writes) to (somebody|someone|a person)", "(Send|Sends|Write) (an email|emails|a mail)", "(Deliver|Delivers) a (text|message) to (someone|somebody)", "(Inform|Notify) a person"),
        {"who": (("to", "recipient", "name", "person"), "string"), "text": (("text", "body", "message", "content"), "string")},
        ("[Please ](Send|Give) {who} (the|this) (message|text|note|mail): {text}", "[Please ](Tell|Inform|Notify) {who}: {text}", "[Please ](Tell|Inform|Notify) {who} that {text}", "[Please ]Write[ a mail| a message| an email|] to {who}: {text}", "[Please ]Send (a message|an email|a mail|a note) to {who} (saying|that says|with the text|:) {text}", "(Message|Mail|Text|Email) {who}[ this]: {text}", "Let {who} know[ that|:] {text}", "Send to {who}: {text}", "(I want|I need) to (tell|write to|inform) {who}: {text}", "{who} (must|should) know: {text}"),
        lambda rng: {"who": person(rng), "text": f"the {item(rng)} is {rng.value(ADJECTIVES)}"},
        lambda rng, v: {"status": "sent"},
        "I sent your message to {who}.",
    ),
    Domain(
        ("(set|start|create|make|add|new)_(timer|alarm|countdown)", "(timer|alarm|countdown|wake_up|remind_me|set_reminder)"),
        ("(Start|Starts|Set|Create) a (timer|countdown)[ of some minutes]", "(Set|Sets|Start) an alarm after some (minutes|time)", "(Countdown timer|Kitchen timer|Minute timer)", "(Wakes|Reminds|Alerts) the user (later|after some minutes)"),
        {"n": (("minutes", "duration", "time", "mins"), "integer")},
        ("[Please ](Set|Start|Create|Make|Run) (a timer|an alarm|a countdown) (for|of|to) {n} minutes[ please| for me].", "[A ](Timer|Alarm|Countdown) (for|in|of) {n} minutes[, please]", "(Wake|Call|Alert|Ring) me (in|after) {n} minutes.", "(Remind|Tell) me (in|after) {n} minutes.", "(Give|Count) (me |){n} minutes[ for me].", "Let it ring (in|after) {n} minutes.", "I (need|want) (a timer|an alarm) (of|for|in) {n} minutes.", "(Set|Start) (a|the) {n} minute (timer|alarm).", "Set an alarm for {n} minutes from now.", "{n} minutes (timer|alarm|from now)[, please]", "(Can|Could) you[ please] (set|start) a timer for {n} minutes?"),
        lambda rng: {"n": rng.number(1, 90)},
        lambda rng, v: {"status": "started"},
        "The timer is set for {n} minutes.",
    ),
    Domain(
        ("[get_|find_|check_|show_|lookup_](price|stock_price|item_price|cost)", "(price_of|price_check|price_lookup|get_price_of|quote|cost_of)"),
        ("(Get|Find|Show|Returns|Look up|Tells) the (price|cost) of (something|a product|an item|a stock|goods)", "(Look up|Tells|Find out) what (an item|something|a product) costs", "(Price|Cost) of (a product|an item|goods|something)"),
        {"item": (("symbol", "item", "name", "product"), "string")},
        ("(What is|What's|Tell me|Get|Show me|Look up|Find|Check|I need) the[ current] (price|cost) of {item}[ today| now|, please]?", "How (much|expensive) is {item}[ today| now]?", "[The |Current ](Price|Cost) of {item}[, please]?", "What does {item} cost[ today| now]?", "How much (does|do) {item} cost?", "What do (I|we) pay for {item}?", "What is {item} worth[ today| now]?", "How much (do I|must I|do we) pay for {item}?", "{item}: (price|the price|what does it cost)?", "(Can|Could) you[ please] (tell me|check|look up) the price of {item}?"),
        lambda rng: {"item": item(rng)},
        lambda rng, v: {"price": rng.number(1, 900)},
        "The price of {item} is {price}.",
    ),
    Domain(
        ("(book|reserve|get|order)_(table|restaurant|seats|dinner)", "(make_reservation|reservation|restaurant_booking|table_booking)"),
        ("(Book|Books|Reserve|Reserves) a table[ in a restaurant| for dinner]", "(Restaurant|Table|Dinner) (reservation|booking)", "(Reserve|Get) (seats|a table) (for dinner|in a restaurant)"),
        {"place": (("restaurant", "name", "place"), "string"), "n": (("people", "guests", "seats", "persons"), "integer")},
        ("[Please ](Book|Reserve|Get)[ me| us] a table for {n}[ people| persons| guests] (at|in) {place}.", "[Please ](Book|Reserve|Get)[ me| us] a table (at|in) {place} for {n}[ people| persons| guests].", "I (need|want|would like) a table for {n}[ people] (at|in) {place}.", "[A ]Table for {n}[ people] (at|in) {place}[, please]", "Please (reserve|book) {n} seats (at|in) {place}.", "We are {n}[ people] and want to (eat|dine) (at|in) {place}.", "Dinner for {n}[ people] (at|in) {place}[, please].", "(Can|Could) you[ please] (book|reserve) a table for {n} (at|in) {place}?"),
        lambda rng: {"place": place(rng), "n": rng.randint(1, 12)},
        lambda rng, v: {"status": "booked"},
        "Your table for {n} at {place} is booked.",
    ),
    Domain(
        ("(set|change|switch|control)_(light|lamp|lights|lamp_color|light_color)", "(light|lamp|lights|room_light|color_light)"),
        ("(Change|Set|Control|Switch) the (light|lamp)[ of a room| in a room]", "(Set|Change) the colour of (a lamp|a light|the light)", "(Control|Controls) (a lamp|the lights|lamps)"),
        {"room": (("room", "where", "location"), "string"), "colour": (("color", "colour", "value"), "string")},
        ("[Please ](Make|Turn|Set|Switch|Change) the (light|lamp|lights) in the {room} (|to |into ){colour}.", "[Please ](Make|Turn|Set|Switch|Change) the {room} (light|lamp|lights) (|to ){colour}.", "(I want|I need|Give me|We want) {colour} light in the {room}.", "(Light|Illuminate) the {room} in {colour}.", "{colour} light in the {room}[,] please", "(The light|The lamp|Light) in the {room} should be {colour}.", "{room} light: {colour}"),
        lambda rng: {"room": rng.choice(("kitchen", "bedroom", "office", "garden", "hall", "bathroom")), "colour": rng.value(COLOURS)},
        lambda rng, v: {"status": "ok"},
        "The light in the {room} is now {colour}.",
    ),
    Domain(
        ("translate[_text|_words|_sentence|_to|]", "(translator|translation|get_translation|translate_phrase|language_translate)"),
        ("(Translate|Translates) (a text|words|a sentence|something)[ into another language]", "Translation (into another language|of a text|of words)", "(Say|Write) something in another language"),
        {"text": (("text", "sentence", "input"), "string"), "to": (("language", "target", "to", "target_language"), "string")},
        ("[Please ]Translate {text} (to|into|in) {to}[ please| for me].", "How (do you|do I|would you) say {text} in {to}?", "What is {text}[ called] in {to}?", "(Say|Write) {text} in {to}.", "(Give|Tell) me the {to}[ words| translation] (for|of) {text}.", "(to|in|into) {to}: {text}", "{text} in {to}[, please]?", "(Can|Could) you[ please] translate {text} (to|into) {to}?", "I need {text} in {to}."),
        lambda rng: {"text": f"the {rng.value(ADJECTIVES)} {item(rng)}", "to": rng.choice(("French", "German", "Spanish", "Italian", "Dutch", "Latin"))},
        lambda rng, v: {"text": " ".join(pseudo_word(rng) for _ in range(2))},
        "In {to} it is: {text}",
    ),
    Domain(
        ("(get|find|show|load|lookup)_(user|customer|client|account)", "(user_info|customer_data|user_by_id|user_record|user_details)"),
        ("(Get|Show|Find|Returns) what is known about a (user|customer)", "(Look up|Find|Get|Load) a (user|customer) by (number|id)", "(Customer|User) (data|record|information|details)"),
        {"n": (("id", "user_id", "number"), "integer")},
        ("Who is (user|customer)[ number] {n}?", "[Please ](Show|Give|Get|Find) me (user|customer)[ number] {n}.", "[Please ](Get|Find|Show|Load) (user|customer)[ number] {n}[ please].", "(Find|Get|Show) the (user|customer) with[ the] (id|number) {n}.", "What do we know about (user|customer)[ number] {n}?", "Look up (user|customer) {n}[ for me].", "Tell me about (user|customer)[ number] {n}.", "I need the (data|record|name) of (user|customer) {n}.", "(user|customer)[ number] {n}[, please]", "Open the (record|file) of (user|customer) {n}.", "(What is the name of|What is the city of) (user|customer) {n}?"),
        lambda rng: {"n": rng.number(1, 9999)},
        lambda rng, v: {"name": person(rng), "city": place(rng)},
        "User {n} is {name} from {city}.",
    ),
    Domain(
        ("(play|start|hear|put_on)_(music|song|track|title)", "(player|music_player|play|music|jukebox)"),
        ("(Play|Plays|Start|Starts) (a song|music|a track)", "(Music|Song) player", "(Let|Lets) the user hear a song"),
        {"song": (("song", "title", "track", "name"), "string")},
        ("[Please ]Play[ the song| the track| me] {song}[ please| now| for me].", "I (want|would like|need) to (hear|listen to)[ the song] {song}.", "(Start|Put on)[ the song| the track] {song}[ now].", "(Can|Could) you[ please] (play|put on)[ the song] {song}?", "Let (me|us) (hear|listen to)[ the song] {song}.", "(Song|Music|Track): {song}", "{song}, (play it|please play it)"),
        lambda rng: {"song": f"{rng.value(ADJECTIVES)} {item(rng)}"},
        lambda rng, v: {"status": "playing"},
        "I am playing {song}.",
    ),
    Domain(
        ("(get|find|show|plan)_(route|way|directions|path)", "(directions|navigate|route_planner|navigation|route)"),
        ("(Find|Finds|Show|Get) the (way|route|path) (between two places|from one place to another)", "(Route|Way|Trip) planner", "(Directions|Navigation)[ from one place to another| between two places]"),
        {"a": (("from", "start", "origin", "source"), "string"), "b": (("to", "end", "destination", "target"), "string")},
        ("How (do I|do we|can I) (get|go|come|drive) from {a} to {b}?", "[The |A |Show me the |Find the |I need the ](route|way|road) from {a} to {b}[, please].", "Navigate[ me] from {a} to {b}.", "(I am|We are) in {a} and (go|want|must go) to {b}.", "How far is (it |)from {a} to {b}?", "(Directions|Navigation) from {a} to {b}[, please]", "(Bring|Guide|Lead|Take) me from {a} to {b}.", "What is the (best|shortest|fastest) (way|route) from {a} to {b}?", "from {a} to {b}[, please]"),
        lambda rng: {"a": place(rng), "b": place(rng)},
        lambda rng, v: {"kilometres": rng.number(2, 999)},
        "From {a} to {b} it is {kilometres} kilometres.",
    ),
    Domain(
        ("(convert|change|exchange)_(currency|money|euros|amount)", "(exchange|currency_converter|money_converter|exchange_rate)"),
        ("(Convert|Converts|Change|Exchange) (money|currency|an amount)[ into another currency]", "(Currency|Money) (conversion|converter|exchange)"),
        {"n": (("amount", "value", "sum"), "integer"), "to": (("currency", "to", "target"), "string")},
        ("[Please ](Convert|Change|Exchange|Turn) {n} euros (to|into|for) {to}[ please].", "How (much|many) (are|is) {n} euros in {to}?", "What (are|is) {n} euros (worth |)in {to}?", "{n} euros (in|to|into) {to}[, please]?", "How many {to} (are|is|do I get for) {n} euros?", "I (have|want to change) {n} euros and (need|want) {to}.", "(Can|Could) you[ please] convert {n} euros (to|into) {to}?"),
        lambda rng: {"n": rng.number(1, 999), "to": rng.choice(("dollars", "pounds", "yen", "francs", "pesos", "rupees"))},
        lambda rng, v: {"result": rng.number(1, 999)},
        "That is {result} {to}.",
    ),
    Domain(
        ("(create|add|new|plan|schedule)_(event|meeting|appointment|date)", "(calendar_add|calendar|calendar_entry|schedule|add_to_calendar)"),
        ("(Add|Adds|Put) (an event|a meeting|an appointment) to the calendar", "(Schedule|Plan|Create) (a meeting|an event|an appointment)", "Calendar (entry|event)"),
        {"title": (("title", "name", "event", "subject"), "string"), "day": (("day", "date", "weekday", "when"), "string")},
        ("[Please ](Add|Put|Write|Enter) {title} (to|in|into) my calendar (on|for) {day}[ please].", "[Please ](Schedule|Plan) {title} (for|on) {day}[ please].", "(Put|Note) {title} (on|for) {day}.", "On {day} (I have|there is|we have|we do) {title}[, please note it|, note it|].", "(I have|We have|There is) {title} on {day}[, please note it].", "{title} (is on|on|for) {day}, please[ note it| plan it].", "(Create|Make) (an event|a meeting|an appointment) {title} (on|for) {day}.", "(Can|Could) you[ please] (plan|schedule|add) {title} (on|for) {day}?", "{day}: {title}"),
        lambda rng: {"title": f"{rng.value(ADJECTIVES)} {item(rng)}", "day": rng.choice(DAYS)},
        lambda rng, v: {"status": "added"},
        "I added {title} on {day}.",
    ),
    Domain(
        ("(add_to|put_in|fill)_(cart|basket)", "(order|buy|add|purchase)_(item|product|article|goods)", "(order|buy|shop|purchase|place_order)"),
        ("(Put|Add|Adds) (items|products|goods) (into|to) the (cart|basket)", "(Order|Orders|Buy|Purchase) (a product|products|something|items)", "(Shopping cart|Places an order)"),
        {"item": (("item", "product", "name", "article"), "string"), "n": (("quantity", "count", "amount", "number"), "integer")},
        ("[Please ](Order|Buy|Purchase)[ me| us] {n}[ pieces of] {item}[ please| for me].", "[Please ](Add|Put) {n}[ pieces of] {item} (to|into|in) my (cart|basket)[ please].", "I (want|need|would like|take)[ to buy| to order| to have] {n}[ pieces of] {item}.", "(Get|Bring|Send) (me|us) {n}[ pieces of] {item}.", "We (need|want|take) {n}[ pieces of] {item}.", "{n}[ pieces of] {item}[,] please", "(Can|Could) you[ please] (order|buy|get me) {n} {item}?", "{n} {item} (for me|to my cart|in my basket|for us)."),
        lambda rng: {"item": item(rng), "n": rng.number(1, 60)},
        lambda rng, v: {"total": rng.number(1, 900)},
        "I ordered {n} {item} for {total}.",
    ),
    Domain(
        ("(read|open|load|get|show|print)_(file|document|text)", "(cat|file_reader|read|file_content|read_path)"),
        ("(Read|Reads|Open|Opens|Load) a (file|document)[ by its path]", "(Returns|Tells|Show) what is in a (file|document)", "(Content|Text) of a file"),
        {"path": (("path", "file", "filename", "name"), "string")},
        ("[Please ](Read|Open|Load|Show|Print)[ me][ the file| the document] {path}[ please| for me].", "What is (in|inside|written in)[ the file] {path}?", "(Show|Read|Print|Tell)( me|) (what is in|the content of|the text of) {path}", "(Can|Could) you[ please] (read|open|show)[ the file] {path}?", "(I need|I want)[ to see| to read][ the file] {path}.", "(cat|file|content of) {path}"),
        lambda rng: {"path": f"{item(rng)}.{rng.choice(('txt', 'json', 'py', 'md', 'csv'))}"},
        lambda rng, v: {"lines": rng.number(1, 400)},
        "The file {path} has {lines} lines.",
    ),
)  # fmt: skip
