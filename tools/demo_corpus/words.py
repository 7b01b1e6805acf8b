# ruff: noqa: SIM905  (words in a row read better than a list of quoted ones)
"""Word pools of the corpus. Plain data; the evaluation holds its own words."""

from __future__ import annotations

NAMES = (
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Karl Laura Maria Nina Oscar Paul Rosa Sam Tina Victor "
    "Wendy Zoe Ali Aisha Chen Diego Elena Fatima Hiro Ivan Jin Kofi Leila Mei Noor Omar Priya Ravi Sofia Tomas "
    "Yuki Amir Bob Alice Carol Dan Eva Frank Gina Hugo Iris Joe Kate Leo Mia Nora Peter Ruth Simon Tom Uma Vera "
    "Will Lucy Max Ella John Mary James Linda Adam Agnes Albert Alex Amelia Andrew Anton Arthur Astrid Barbara "
    "Bella Boris Bruno Carla Cecilia Charles Charlotte Chloe Clemens Daniel Daria Dennis Dora Edith Edward Elias "
    "Elisa Elsa Eric Erika Esther Ethan Eugene Fiona Florian Francis Gabriel George Gerda Greta Hanna Harold Helen "
    "Hilda Holly Ian Ingrid Isaac Isabel Jacob Jane Jasmine Jason Joanna Jonas Joseph Julian Justin Karim Kevin "
    "Klaus Lars Lena Linus Lisa Louis Magnus Marco Marta Martin Matthew Maurice Megan Milo Monica Nadia Nathan "
    "Nicole Nils Olga Olivia Otto Patrick Pedro Petra Philip Rachel Ralph Rebecca Robert Roman Ruby Samuel Sandra "
    "Sarah Sebastian Silvia Stefan Susan Sven Tamara Teresa Theo Thomas Ursula Valerie Viktor Violet Walter Xavier "
    "Yara Yusuf Zara"
).split()
CITIES = (
    "Paris London Berlin Madrid Rome Vienna Oslo Tokyo Lima Cairo Delhi Boston Chicago Dublin Prague Athens Lisbon "
    "Zurich Seoul Sydney Toronto Nairobi Lagos Munich Hamburg Milan Geneva Warsaw Budapest Moscow Beijing Shanghai "
    "Mumbai Denver Seattle Amsterdam Ankara Antwerp Atlanta Auckland Baghdad Baltimore Bangkok Barcelona Basel "
    "Belfast Bergen Bern Bogota Bologna Bonn Bremen Brisbane Bristol Brussels Bucharest Calgary Cardiff Casablanca "
    "Cleveland Cologne Copenhagen Dakar Dallas Detroit Dresden Dubai Durban Edinburgh Florence Frankfurt Gdansk "
    "Genoa Glasgow Granada Graz Hanoi Havana Helsinki Houston Istanbul Jakarta Kabul Karachi Krakow Kyoto Leeds "
    "Leipzig Lille Linz Liverpool Lyon Malaga Manchester Manila Marseille Melbourne Miami Minsk Montreal Nagoya "
    "Nantes Naples Nice Osaka Ottawa Oxford Palermo Perth Phoenix Porto Portland Quito Riga Rotterdam Salzburg "
    "Santiago Seville Singapore Sofia Stockholm Tampere Tehran Toulouse Tunis Turin Utrecht Valencia Vancouver "
    "Venice Verona Vilnius Zagreb"
).split()
COLOURS = (
    "red blue green yellow orange purple pink brown black white grey silver gold turquoise violet scarlet crimson "
    "beige ivory navy teal indigo cyan maroon olive amber copper bronze pearl coral lilac mustard charcoal"
).split()
FRUITS = (
    "apple banana cherry mango orange pear grape lemon peach plum kiwi melon fig lime apricot pineapple papaya "
    "raspberry blueberry strawberry grapefruit coconut quince nectarine date"
).split()
ANIMALS = (
    "cat dog horse rabbit parrot hamster goat cow sheep lion tiger bear wolf fox owl mouse rat pig duck goose hen "
    "eagle hawk crow sparrow pigeon swan frog toad snake lizard turtle fish shark whale dolphin seal crab spider "
    "ant bee wasp fly moth butterfly beetle snail worm deer elk moose camel donkey zebra giraffe monkey gorilla "
    "elephant rhino panda koala otter beaver badger squirrel hedgehog bat mole penguin ostrich peacock salmon "
    "trout lobster"
).split()
FOODS = (
    "pizza pasta soup rice bread cheese salad curry noodles pancakes sushi tacos chocolate cake burger sandwich "
    "omelette stew porridge cereal yogurt butter honey jam sausage bacon ham steak chicken shrimp dumplings "
    "lasagna risotto falafel hummus pie biscuit cookie muffin waffle pudding toast popcorn crackers lentils beans "
    "tofu"
).split()
HOBBIES = (
    "chess painting running reading cooking swimming hiking gardening music dancing cycling photography knitting "
    "sewing fishing skiing sailing climbing boxing archery juggling pottery drawing baking camping skating surfing "
    "rowing birdwatching carpentry singing yoga"
).split()
JOBS = (
    "teacher doctor engineer nurse baker pilot farmer painter writer lawyer driver student scientist gardener chef "
    "plumber carpenter electrician mechanic dentist surgeon pharmacist librarian journalist editor translator "
    "actor singer dancer soldier judge waiter barber tailor butcher fisherman miner sailor clerk accountant banker "
    "manager designer architect programmer analyst researcher professor"
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
    "block queue stream cache tower castle palace temple church museum theatre cinema hotel hospital station "
    "airport harbour factory office shop store barn stable garage cellar attic roof wall floor ceiling door gate "
    "fence path street avenue tunnel canal lake ocean sea beach coast cliff valley hill mountain volcano desert "
    "field meadow swamp jungle tree leaf branch root flower rose tulip seed grass bush mushroom sand mud dust rain "
    "snow storm thunder wind fog ice fire smoke flame ash sun moon star planet comet sky sunset dawn shadow mist "
    "chair bench sofa bed pillow blanket carpet curtain shelf drawer cupboard desk stove oven fridge kettle cup "
    "mug plate bowl spoon fork knife pan pot jar box bag sack suitcase wallet purse coin key lock chain rope "
    "thread needle button zipper shirt coat jacket sweater dress skirt scarf glove hat cap helmet shoe boot sock "
    "belt ring necklace bracelet watch glasses umbrella brush comb soap towel sponge bucket broom hammer nail "
    "screw saw drill wrench shovel rake axe wheel tyre pedal motor battery cable wire plug switch bulb lantern "
    "torch radio camera phone laptop keyboard screen printer robot rocket satellite plane helicopter balloon boat "
    "ship ferry canoe raft anchor sail bus truck tram bicycle scooter wagon cart sledge map compass flag drum "
    "piano guitar violin flute trumpet bell whistle song poem novel story chapter page sentence word alphabet "
    "number figure circle square triangle line point corner edge surface picture painting statue puzzle game toy "
    "doll ball kite dice card medal trophy prize gift parcel envelope stamp postcard magazine newspaper notebook "
    "diary calendar ruler eraser crayon chalk ink glue scissors tape string farmer king queen prince knight wizard "
    "pirate giant ghost monster dragon captain guard thief hero neighbour friend guest child teacher crowd family "
    "village town capital kingdom army battle treaty law crime prison court mayor election vote party club team "
    "league match goal score record race finish track pool gym medicine pill bandage wound fever tooth bone muscle "
    "skin heart brain stomach shoulder elbow knee ankle finger thumb nose ear eye mouth tongue chin cheek neck "
    "back chest hair beard bread flour sugar salt pepper spice oil vinegar sauce juice tea coffee milk cream egg "
    "meat harvest wheat corn barley straw hay wool cotton silk leather wood metal iron steel copper bronze glass "
    "plastic rubber brick cement marble diamond crystal magnet laser lens signal code secret message report answer "
    "question reason result problem idea plan project budget invoice receipt contract account loan bank tax price "
    "sale customer order product sample label package delivery stock meeting lesson exam lecture degree college "
    "lab experiment theory formula equation fraction angle volume weight length height depth speed"
).split()
VERBS = (
    "runs sleeps sings waits jumps smiles works plays reads walks dances shines falls grows talks listens laughs "
    "cries shouts whispers swims flies climbs crawls hides seeks finds loses opens closes builds breaks repairs "
    "paints draws writes counts cooks bakes eats drinks buys sells travels arrives leaves stays returns begins "
    "ends burns melts freezes floats sinks rolls spins"
).split()
ADJECTIVES = (
    "small big old new quick slow happy quiet bright dark warm cold soft strong clever brave lazy kind young tall "
    "short long wide narrow deep shallow heavy light thin thick round square flat sharp blunt smooth rough wet dry "
    "clean dirty empty full loud silent gentle fierce calm angry proud shy honest loyal polite rude famous secret "
    "simple complex cheap rich poor rare common early late modern ancient wooden golden silver rusty shiny pale "
    "bitter sweet sour salty fresh rotten hungry thirsty sleepy tired busy free safe dangerous lucky strange funny "
    "serious hidden broken frozen distant huge tiny"
).split()
FILLERS = (
    "we you they she he it I all some many few here there now then always never often soon at in on of to with for "
    "from by about under over near after before is are was were be have has had will can must may live go come see "
    "know think want need make take give tell this that these those my your our their his her its not no and or "
    "but so very too just only more less most first last next other same both each every what when where why who "
    "how if because while until again"
).split()
"""Short words of any sentence."""
WORDS = tuple(dict.fromkeys((*NOUNS, *ANIMALS, *FOODS, *FRUITS, *VEGETABLES, *COLOURS, *ADJECTIVES, *HOBBIES, *JOBS)))
TOOL_VERBS = (
    "get set run make check open find create delete update list add remove start stop send fetch load save read "
    "write show count plan book cancel move copy rename merge split lock unlock enable disable build test deploy "
    "restart scan print draw play pause record upload download sync backup restore assign approve reject close "
    "archive export import convert compute measure estimate compare validate parse format filter sort group tag "
    "rate review order pay refund"
).split()
KEYS = (
    "name title city street colour size weight price amount status owner author year month level score email code "
    "kind tag label note room seat date topic language country speed height rating stock unit brand model part "
    "order id user type value count path mode source target parent host port region zone version phase stage state "
    "group role team manager client customer supplier address phone zip postcode district floor building width "
    "depth length volume area duration start end begin finish deadline reason comment summary text body subject "
    "sender receiver recipient message url link file folder format quality quantity total subtotal discount tax "
    "currency account balance limit quota rate index rank position row column page chapter section genre artist "
    "album track player coach league season round goal distance angle latitude longitude temperature pressure "
    "humidity wind sky engine fuel gear wheel seats doors material shape pattern texture flavour smell sound "
    "species breed age gender nickname surname birthday hobby job salary office"
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
    "false", "black": "white", "buy": "sell", "give": "take", "push": "pull", "win": "lose", "near": "far", "inside":
    "outside", "above": "below", "young": "aged", "first": "last", "start": "finish", "love": "hate", "good": "bad",
    "loud": "quiet", "heavy": "weightless", "thick": "thin", "wide": "narrow", "deep": "shallow", "safe": "dangerous",
    "cheap": "expensive", "easy": "difficult", "north": "south", "east": "west", "summer": "winter"
}  # fmt: skip

PLACES_UNKNOWN = (
    "Iceland Nepal Mongolia Bolivia Ghana Senegal Jordan Oman Yemen Laos Fiji Samoa Malta Cyprus Latvia Estonia "
    "Georgia Armenia Uganda Rwanda Zambia Panama Jamaica Haiti Belize Texas Bavaria Siberia Patagonia Alaska "
    "Tasmania Sicily Scotland Wales Catalonia Mars Atlantis Narnia"
).split()
"""Whose capitals the model does not know."""
SUBJECTS = (
    "gravity evolution democracy inflation philosophy chemistry biology physics astronomy geology history "
    "economics religion psychology mathematics algebra geometry statistics electricity magnetism radioactivity "
    "vaccination photography football tennis cricket hockey baseball basketball golf rugby opera jazz poetry "
    "cinema fashion architecture archaeology meditation nutrition agriculture forestry tourism marketing insurance "
    "taxation migration climate erosion fermentation digestion respiration hibernation capitalism socialism "
    "feudalism colonialism slavery globalization urbanization blockchain bitcoin cryptography robotics genetics "
    "cloning cancer diabetes malaria influenza asthma allergies insomnia anxiety dinosaurs volcanoes earthquakes "
    "tsunamis hurricanes glaciers deserts rainforests galaxies comets asteroids neutrinos electrons enzymes "
    "proteins vitamins hormones bacteria viruses"
).split()
ROLES = (
    "president king queen mayor minister chancellor ambassador director founder owner chairman captain coach "
    "trainer goalkeeper bishop pope governor senator judge admiral general editor conductor composer producer "
    "inventor champion"
).split()
EVENTS = (
    "war revolution election festival battle olympics world cup marathon flood fire strike conference summit "
    "plague expedition wedding coronation eruption moon landing gold rush trial concert tournament auction"
).split()
MATERIALS = (
    "iron copper gold silver lead tin zinc nickel mercury helium oxygen nitrogen carbon sulphur chlorine sodium "
    "calcium uranium titanium aluminium cobalt platinum granite glass rubber plastic wax sugar salt alcohol petrol "
    "ammonia"
).split()
