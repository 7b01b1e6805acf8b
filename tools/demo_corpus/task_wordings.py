# ruff: noqa: E501  (one pattern per line reads better than wrapped ones)
"""How users ask for the tasks: patterns (`source.py`), with the places of the values in braces.

Plain data. Independent of the answers. Invariant: a wording and its values leave one right answer.
"""

from __future__ import annotations

ECHO = (
    "[Please ](Repeat|Say|Echo|Write|Type|Print|Copy|Output)[ this| the text| exactly| after me]: {}",
    "[Please ](Repeat|Say|Echo|Write|Type|Print|Copy|Output)[ just| only] (this|the following)[ text| line| words]: {}",
    '(Repeat|Say|Echo|Write|Type|Print|Output)[ just| only| exactly] "{}"',
    "(Say|Echo|Write|Type|Print)[ just| exactly] {}",
    "(Just|Only|Simply) (say|repeat|write|type|print|echo) {}",
    "(Just|Only|Simply) (say|repeat|write|type|print|echo): {}",
    "(Say|Write|Type|Print|Repeat|Answer|Reply) only {}",
    "(Say|Write|Type|Print|Repeat) nothing (but|else than) {}",
    "(Answer|Reply|Respond)[ only| just| exactly] with[ the word| the words| the text| only] {}",
    "(Answer|Reply|Respond) with[ only| exactly| just| nothing but][ this| the text]: {}",
    '(Answer|Reply|Respond) with "{}"[ and nothing else]',
    "(Answer|Reply|Respond)[ only| exactly]: {}",
    "(Can|Could) you (say|repeat|write|echo|type)[ this| this back]: {}",
    "(Can|Could|Would) you[ please] (say|repeat|write|echo) {}",
    "(Repeat|Say|Copy|Write) (the|my) (words|word|text|sentence|phrase)[ exactly]: {}",
    "(Repeat|Say|Write) the (words|text|phrase) {}",
    "(Repeat|Say) (this|it)[ back] to me: {}",
    "(Repeat|Echo|Say)[ this] back: {}",
    "(Write|Note|Put) down: {}",
    "(Give|Send|Read|Say) me back: {}",
    "(Give|Read) (this|the text) back[ to me][ unchanged]: {}",
    "(Return|Send back|Give back|Output)[ this text| this| the text] (unchanged|as it is|exactly): {}",
    "(Copy|Output|Repeat|Write)[ the text| this| exactly this]: {}",
    "Parrot this: {}",
    "I want you to (say|write|repeat|type)[ this]: {}",
    "I (want|would like) to (hear|read|see): {}",
    "Your (answer|reply|next message) is: {}",
    "Let me (hear|read|see) (the words|the text|this): {}",
    "Now say {}",
    "{} - (repeat|say|copy|echo) (this|that|it)",
)

TIMES = (
    "[Please ](Say|Write|Repeat|Print|Type|Echo|Output) {w} {n} times.",
    "[Please ](Say|Write|Repeat|Print|Type|Echo|Output) the word {w} {n} times.",
    "[Please ](Say|Write|Repeat|Print|Type|Echo|Output)[ it] {n} times: {w}",
    "(Say|Write|Repeat|Print|Type) {n} times[ the word] {w}",
    "(Can|Could|Would) you[ please] (say|write|repeat|type)[ the word] {w} {n} times?",
    "(Give|Show|Send|Tell|Write|Print) me[ the word] {w} {n} times.",
    "(Give|Show|Send|Write) me {n} times[ the word] {w}.",
    "I (want|need|would like)[ to see| to hear| to read| to have][ the word] {w} {n} times.",
    "I (want|would like) you to (say|write|repeat) {w} {n} times.",
    "Let me (see|hear|read|have) {w} {n} times.",
    "{n} times[ the word| please|:] {w}",
    "{w}, {n} times[ please]",
    "{w} {n} times[, please| in a row]",
    "(Make|Build) a (row|line) of {n} times {w}.",
    "The word {w}, {n} times[, please].",
)

COUNT_UP = (
    "[Please ]Count[ up| upwards|, please,] from {a} to {b}.",
    "[Please ]Count[ up] {a} (to|through|until|up to) {b}",
    "[Please ]Count from {a}[ up| upwards] (to|until|through|till) {b}.",
    "(Can|Could|Would) you[ please] count[ up| for me] from {a} to {b}?",
    "(Can|Could) you count {a} to {b}?",
    "Count[ up] from {a} to {b}[ for me| now| in order]",
    "Count[, please|], (starting|beginning) (at|with|from) {a}[ and|,] (ending|stopping) (at|with) {b}.",
    "(Start|Begin)[ counting] (at|with|from) {a} and (count|go)[ up] to {b}.",
    "(Start|Begin) (at|with) {a} and (stop|end|finish) (at|with) {b}.",
    "[Please ](Write|List|Say|Name|Print|Type|Show)[ down] the numbers[ from] {a} (to|through|up to) {b}.",
    "[Please ](Write|List|Say|Name|Print|Type|Show) (all|all the|every|each) (numbers|number|integers)[ from] {a} (to|through|up to) {b}.",
    "(Write|List|Say|Name|Print|Show)[ all| me| me all][ the] numbers between {a} and {b}.",
    "(Write|List|Say|Name|Print|Show) (all|every) (numbers|number|integers) between {a} and {b}, (both|ends|them|limits) included.",
    "(Give|Show|Tell|Write|List) me[ all] the numbers[ from] {a} (to|up to|through) {b}.",
    "(Give|Show|Tell|Write|List) me (every|each) number from {a}[ up] to {b}.",
    "(Give|Show|Tell) me[ all| all the] numbers between {a} and {b}.",
    "I (need|want|would like)[ all] the numbers (from {a} to|between {a} and|{a} to) {b}.",
    "[The |All ]numbers[ from] {a} (to|up to|through) {b}[, please| please]",
    "[The |All ]numbers between {a} and {b}[, please]",
    "What are the numbers (from {a} to|between {a} and) {b}?",
    "From {a} to {b}[, please]: (count|the numbers)",
    "From {a}, count[ up] to {b}",
    "Go from {a}[ up] to {b}[ one by one].",
    "Counting[ up] from {a} to {b}",
)

COUNT_DOWN = (
    "[Please ]Count[ down| backwards| backward| downwards|, please,] from {b} to {a}.",
    "[Please ]Count[ down| backwards| backward| in reverse] {b} (to|through|until|down to) {a}",
    "[Please ]Count[ backwards| backward], {b} (to|down to) {a}",
    "[Please ]Count (backwards|backward|down|downwards): {b} (to|down to) {a}",
    "[Please ]Count from {b}[ down| downwards| back| backwards] (to|until|through|till) {a}.",
    "(Can|Could|Would) you[ please] count[ down| backwards| back] from {b} to {a}?",
    "(Can|Could) you count {b} (to|down to) {a}?",
    "Count[ down| backwards] from {b} to {a}[ for me| now| in order]",
    "Count[, please|], (starting|beginning) (at|with|from) {b}[ and|,] (ending|stopping) (at|with) {a}.",
    "Count[ down| backwards| in reverse| in reverse order] from {b} to {a}.",
    "(Start|Begin)[ counting] (at|with|from) {b} and (count|go)[ down| back] to {a}.",
    "(Start|Begin) (at|with) {b} and (stop|end|finish) (at|with) {a}.",
    "[Please ](Write|List|Say|Name|Print|Type|Show)[ down] the numbers[ from] {b} (to|through|down to) {a}.",
    "[Please ](Write|List|Say|Name|Print|Type|Show) (all|all the|every|each) (numbers|number|integers)[ from] {b} (to|through|down to) {a}.",
    "(Write|List|Say|Name|Print|Show)[ all| me| me all][ the] numbers between {b} and {a}.",
    "(Give|Show|Tell|Write|List) me[ all] the numbers[ from] {b} (to|down to|through) {a}.",
    "(Give|Show|Tell|Write|List) me (every|each) number from {b}[ down] to {a}.",
    "I (need|want|would like)[ all] the numbers (from {b} to|between {b} and|{b} to) {a}.",
    "[The |All ]numbers[ from] {b} (to|down to|through) {a}[, please| please]",
    "[A |a ](countdown|count-down)[ from] {b} (to|down to|until) {a}[, please]",
    "(Give me|I want|Make|Do|Write) a countdown from {b} to {a}.",
    "What are the numbers (from {b} to|between {b} and) {a}?",
    "From {b} to {a}[, please]: (count|the numbers)",
    "From {b}, count[ down| back| backwards] to {a}",
    "Go from {b}[ down| back] to {a}[ one by one].",
    "(Backwards|Backward|In reverse): {b} to {a}",
    "Counting[ down| backwards] from {b} to {a}",
)

COUNT_TO = (
    "[Please ]Count[ up] (to|until|till) {b}[ for me| now].",
    "(Can|Could|Would) you[ please] count[ up] to {b}?",
    "Count[ up] to {b}, please",
    "(Count|Start) from one[ up| and count] to {b}",
    "I (want|would like) you to count to {b}.",
    "(Write|Say|List|Show)[ me] the first {b} numbers.",
)

LIST = (
    "[Please ](List|Name|Write|Show|Print)[ me| us] {n} {g}.", "(Give|Tell|Show|Send) (me|us) {n} {g}.", "{n} {g}[,] please", "(Can|Could) you[ please] (name|list|give me|tell me|write) {n} {g}?",
    "I (need|want|would like|would like to see) {n} {g}.", "(Write|Note|Put) down {n} {g}.", "(Give me|Make|Write|Show me|I need|I want) a list of {n} {g}.",
    "(Which|What) {n} {g} do you know?", "(Think of|Tell me about|Choose|Pick) {n} {g}.", "(Some|Any) {n} {g}[, please]", "(Do you know|Can you think of) {n} {g}?", "Let me (see|have) {n} {g}.",
)  # fmt: skip

SORT = (
    "Sort: {}", "(Sort|Order|Arrange) {}", "[Please ](Sort|Order|Arrange) (this|the list|this list): {}", "(Put|Bring)[ these| this| them| the following] (in|into|in the right) order: {}", "Order: {}",
    "Please (sort|order|arrange) {}", "(Can|Could) you[ please] (sort|order|arrange)[ these:] {}", "In order[, please]: {}", "What is the (right|correct) order of {}?",
)  # fmt: skip

SORT_NUMBERS = (
    *SORT,
    "[Please ](Sort|Order|Arrange)[ these| the| my| the following] numbers[ for me| in order| ascending]: {}",
    "(Sort|Order|Arrange) the numbers {}",
    "(Put|Bring)[ these| the] numbers (in|into) order: {}",
    "(Sort|Order|Arrange|List)[ these] from (the smallest to the largest|small to large|low to high|the lowest to the highest): {}",
    "(Sort|Order)[ in] ascending[ order]: {}",
    "From (the smallest to the largest|small to large|low to high): {}",
    "(Sort|Order) this list of numbers: {}",
    "(Give|Show|Tell) me these numbers (in order|sorted|in ascending order): {}",
    "(Smallest|Lowest) (number |)first: {}",
)

SORT_WORDS = (
    *SORT,
    "[Please ](Sort|Order|Arrange)[ these| the| my| the following] words[ for me| alphabetically| by the alphabet]: {}",
    "(Sort|Order|Arrange) the words {}",
    "(Put|Bring)[ these| the] words (in|into)[ alphabetical] order: {}",
    "[Please ](Sort|Order|Arrange|List)[ these| this] (alphabetically|by the alphabet|in alphabetical order|from A to Z|A to Z): {}",
    "(Put|Bring)[ these] (in|into) alphabetical order: {}",
    "(Sort|Order) this list of words[ alphabetically]: {}",
    "(Give|Show|Tell) me these words (in alphabetical order|in order|sorted): {}",
    "(Alphabetically|By the alphabet|From A to Z): {}",
)

JSON_OBJECT = (
    "(Make|Write|Create|Build|Give me|Return|Output|I need) a JSON object (with|from|of|where) {}", "(Write|Make|Create|Give me|Return|Output)[ some] JSON[ with| from|:] {}", "JSON (object |)(with|of|from) {}",
    "(Create|Write|Make) a JSON object: {}", "(Turn|Put|Convert|Change) (this|these) (into|to) JSON: {}", "(Convert|Turn|Put|Write) (to|as|into|in) JSON: {}", "(Output|Answer|Reply|Express|Write)[ this] (as|in) JSON: {}", "(as|in) JSON[, please]: {}",
    "Please (make|write|create) JSON (from|with|of) {}", "JSON[,] please: {}", "(Format|Encode|Store|Save|Represent)[ this] as[ a] JSON[ object]: {}", "Give me this (as|in) JSON: {}", "(Put|Store) this (into|in|as)[ a] JSON[ object]: {}",
    "(Can|Could) you[ please] (make|write|give me)[ a] JSON[ object] (with|from|of) {}?",
)  # fmt: skip

JSON_LIST = (
    "(Make|Write|Create|Give me|Return|Output|Build) a JSON (list|array) (of|with|from) {}",
    "JSON (array|list) (with|of|from) {}",
    "(Make|Write|Create|Give me|Return) a JSON (list|array): {}",
    "(Write|Put|Store|Give me) (these|these words|them) (as|into|in) a JSON (array|list): {}",
    "(Turn|Convert|Change) (this list|these words|these) (to|into)[ a] JSON[ list| array]: {}",
    "A JSON (list|array) of {}",
    "As a JSON (array|list): {}",
    "JSON (list|array): {}",
)

SUM = (
    "What is {a} {s} {b}?", "What is {a} {w} {b}?", "{a} {s} {b}", "{a}{s}{b}", "[Please ](Calculate|Compute|Solve|Work out) {a} ({s}|{w}) {b}.", "How much is {a} ({s}|{w}) {b}?", "{a} {w} {b}", "What's {a}{s}{b}?", "{a} {s} {b} =", "{a}{s}{b}=",
    "(What|How much) (does|do|will) {a} {w} {b} (make|give|equal)?", "Tell me (what|how much) {a} ({s}|{w}) {b} is.", "(Can|Could) you[ please] (calculate|compute|solve|tell me) {a} {s} {b}?", "work out {a} {w} {b}", "What is the result of {a} ({s}|{w}) {b}?",
    "What do you get (for|from) {a} ({s}|{w}) {b}?", "{a} {s} {b} is (what|how much)?", "{a} ({s}|{w}) {b}, please", "The result of {a} ({s}|{w}) {b}[, please]", "{a} {s} {b} = ?", "(I need|Give me) (the result of |){a} ({s}|{w}) {b}.", "{a} {w} {b} (is|makes|equals)",
)  # fmt: skip

NEIGHBOUR = (
    "(What|Which|Which one|What one) (comes|is|stands|follows directly) {p} {i}?",
    "What (is|comes|do we have)[ directly| right| just] {p} {i}?",
    "(Tell me|Say|Name|Give me) what (comes|is)[ directly| right] {p} {i}.",
    "[Please ](Tell me|Name|Give me|Say) the (one|next one) {p} {i}.",
    "(Do you know|Can you tell me|Can you say) what (comes|is) {p} {i}?",
    "And[ what comes| what is|] {p} {i}?",
    "[Directly |Right |Just |One |The one |Next ]{p} {i}?",
    "{p} {i} comes[ what]?",
    "{p} {i} (is|we have|there is)[ what]?",
    "The (one|next) {p} {i}[, please]?",
    "{p} {i}, (please|what comes|what is it|which one)?",
)

FIRST = (
    "What is the first word (of|in): {}", "[The ]First word[ of| in|,][ please]: {}", "(Give|Tell|Show) me the first word[ of| in]: {}", "(Which|What) word (comes|is|stands) first[ in| here]: {}",
    "(Say|Name|Write|Repeat) the first word[ of| in]: {}", "(Which|What) is the first word[ here| of this]: {}", "(What|Which) word does (this|it) (begin|start) with: {}", "(Which|What) word (begins|starts) (this|the text): {}", "With which word does this (begin|start): {}",
)  # fmt: skip
LAST = tuple(
    pattern.replace("first", "last").replace("First", "Last").replace("(begin|start)", "(end|finish)").replace("(begins|starts)", "(ends|closes)")
    for pattern in FIRST
)  # fmt: skip
UPPER = (
    "[Please ](Write|Put|Say|Print|Type)[ this| it] in (upper case|capital letters|capitals|uppercase): {}", "[Please ](Write|Put|Say|Print|Type) {} in (upper case|capital letters|capitals|uppercase).", "(Put|Turn|Convert|Change) into (upper case|capital letters|capitals): {}",
    "In (upper case|capital letters|capitals)[, please]: {}", "(Make|Turn|Change|Convert) {} (upper case|into capitals|to upper case|to capital letters).", "(uppercase|capitalise all of|shout)[:] {}", "(Capital letters|Upper case)[, please]: {}", "{} in (capital letters|upper case|capitals)[, please]",
)  # fmt: skip
JOIN = (
    "Join[ these| the words] with commas: {}", "(Put|Set|Write|Insert) commas between[ these| the words]: {}", "Separate[ these| the words] (with|by) commas: {}",
    "(With|Add) commas[ between the words]: {}",
)  # fmt: skip
