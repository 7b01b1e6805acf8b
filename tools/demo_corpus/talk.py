# ruff: noqa: E501  (one phrase list or case per line reads better than wrapped ones)
"""Talk: greetings, questions about the model, project knowledge, unknown questions, jokes and stories.

Independent of tokens or weights. Invariant: the same question always has the same answer, unless a system prompt says
otherwise.
"""

from __future__ import annotations

from .dialogue import Dialogue, assistant, pseudo_word, system, turns, user, vary
from .facts import ANSWERS, EVERYDAY, FAILURES, PROJECT, QUESTION_FRAMES
from .source import Source, wordings_of
from .unknown import UNKNOWN, unknown_question
from .words import ANIMALS, CAPITALS, NAMES, OPPOSITES

WHO = "I am a small demo model of the llmbackend project."

SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello!", "Hi", "Hello", "Hey", "Hi there!", "Hello there", "Good morning", "Good evening!", "Good afternoon", "hey there", "Greetings", "Hi there[,] model", "yo", "Hello!!!", "Hi hi", "Good day", "hello you", "Hello model", "Hey you", "Good morning to you!"), "Hello! How can I help you?"),
    (("How are you?", "(Hello|Hi|Hey|Hi there|Hello there)[,] how are you[ doing][ today]?", "How are you doing[ today| now]?", "How do you do?", "How is it going?", "Are you well?", "how are you today", "How are things?", "Are you ok?", "How do you feel?", "hey, how are you doing", "Hello, how are you?", "Hi! How are you?", "what's up"), "I am fine, thank you. How can I help you?"),
    (("Who are you?", "(Who|What) (are|r) you?", "(Hello|Hi|Hey), who are you[ and what can you do]?", "(And|So|Ok,) who are you?", "(What are you|Who are you) exactly?", "What is your name?", "Introduce yourself.", "Tell me about yourself.", "Hi, who are you?", "are you a bot", "Are you an AI?", "Are you human?", "Are you ChatGPT?", "Which model are you?", "What model is this?", "your name?", "Hello, who are you?", "Tell me who you are.", "What is this model?", "Who is speaking?", "Who am I talking to?", "who is this", "What should I call you?"), WHO),
    (("What can you do?", "What (can you do|are you able to do|do you know|are you made for)[ for me]?", "How can you help[ me| us]?", "Help", "What are you good at?", "What are your skills?", "Can you help me?", "What should I ask you?", "list your skills", "What do you do?", "What are you capable of?", "Tell me what you can do.", "Which tasks can you do?", "What can I ask?", "Show me what you can do.", "What are your abilities?"), "I can answer questions about llmbackend, count, repeat, sort, make lists and JSON, remember what you tell me, and call tools."),
    (("Thanks!", "Thank you", "(Thanks|Thank you)[ so much| very much| a lot| again]( for your help| for the help| for everything| for the answer|, bye|, that is all|)", "(Great|Perfect|Good|Nice|Wonderful), (thanks|thank you)[ so much| a lot]", "Thank you very much.", "thanks a lot", "Great, thanks", "Many thanks", "thx", "Perfect, thank you!", "That helps, thanks.", "Thank you so much!", "Thanks for the help.", "I thank you.", "ok thanks", "Thanks, that was useful.", "Cheers", "Much appreciated."), "You are welcome!"),
    (("Goodbye", "Bye", "(Ok|Okay|So|Well|Thanks)[,] (bye|goodbye|see you)[ now| then| for now]", "See you later", "Bye bye!", "Good night", "See you", "I have to go.", "Farewell", "ciao", "Bye for now!", "I am leaving now.", "ok, goodbye", "Until tomorrow!", "That is all, bye."), "Goodbye! Have a nice day."),
    (("You are great.", "Well done!", "Good job", "Nice work", "I like you.", "You are smart.", "Cool!", "Awesome", "great"), "Thank you, that is kind."),
    (("You are wrong.", "That is not right.", "You are stupid.", "That was bad.", "I don't like that."), "I am sorry. I am only a small demo model."),
    (("Do you like music?", "Do you have feelings?", "Do you dream?", "Are you happy?", "Do you sleep?", "Are you alive?"), "I am a program, so I have no feelings, but I am happy to help."),
    (("Tell me a joke.", "Do you know (a|another|any) joke?", "(Tell|Give) me (a|another|one more) joke[, please| please]", "Make me laugh.", "Say something funny.", "another joke", "a joke please", "One more joke!", "Please tell me a joke.", "Can you tell a joke?", "I want to hear a joke.", "joke"), "Why did the token stand in line? It was waiting for its batch."),
    (("Yes", "No", "ok", "Okay", "sure", "fine", "I see", "hmm"), "All right. What would you like to do next?"),
    (("Test", "test 123", "Is this working?", "Are you there?", "ping", "Can you hear me?", "This is a test."), "Yes, I am here. The server works."),
    (("Say something.", "Talk to me.", "Say anything", "Write something."), "Hello! I am a small model, served with continuous batching."),
)  # fmt: skip


def small_talk_pair(rng: Source) -> tuple[str, str]:
    questions, answer = rng.choice(SMALL_TALK)
    return vary(rng, rng.choice(wordings_of(rng.choice(questions)))), answer


def fact_pair(rng: Source) -> tuple[str, str]:
    if rng.random() < 0.72:
        terms, answer = rng.choice(PROJECT)
        question = rng.wording(QUESTION_FRAMES).format(t=rng.choice(terms))
    else:
        questions, answer = rng.choice(ANSWERS)
        question = rng.choice(questions)
    return vary(rng, question), answer


def failure_pair(rng: Source) -> tuple[str, str]:
    patterns, answer = rng.choice(FAILURES)
    return vary(rng, rng.wording(patterns)), answer


def everyday_pair(rng: Source) -> tuple[str, str]:
    roll = rng.random()
    if roll < 0.4:
        country, capital = rng.choice(list(CAPITALS.items()))
        frames: tuple[str, ...] = (
            "(What is|What's|Name|Tell me|Give me|Say|And) the capital[ city] of {}?",
            "(capital|capital city|the capital|the capital city)(| of) {}[, please]?",
            "(Which|What) city is the capital of {}?",
            "(Which|What) capital has {}?",
            "(Which|What) is the capital[ city] of {}?",
            "(Do you know|Do you remember|Can you tell me|Can you name|I need|I forgot) the capital[ city] of {}?",
            "{}: which capital?",
            "{} has (which|what) capital?",
            "(Hey|Hi|Hello), what is the capital of {}?",
        )
        return vary(rng, rng.wording(frames).format(country)), f"The capital of {country} is {capital}."
    if roll < 0.6:
        word, other = rng.choice(list(OPPOSITES.items()))
        if rng.random() < 0.5:
            word, other = other, word
        frames = (
            "(What is|What's|Tell me|Name|Give me|Say) the (opposite|contrary) of {}?",
            "(opposite|the opposite|contrary|the contrary) (of|to) {}[, please]?",
            "Which word is the (opposite|contrary) of {}?",
            "(Do you know|Can you tell me) the (opposite|contrary) of {}?",
            "{}: the opposite?",
        )
        return vary(rng, rng.wording(frames).format(word)), f"The opposite of {word} is {other}."
    questions, answer = rng.choice(EVERYDAY)
    return vary(rng, rng.choice(questions)), answer


def story_pair(rng: Source) -> tuple[str, str]:
    animal = rng.choice((*ANIMALS, "robot", "dragon", "child", "model"))
    frames = (
        "Tell me a story about a {}.",
        "Write a short story about a {}.",
        "Tell a story about a {}.",
        "a story about a {}",
    )
    if rng.random() < 0.3:
        animal, frames = (
            "robot",
            ("Tell me a story.", "Write a story.", "Write a short story.", "Tell me a long story."),
        )
    return vary(rng, rng.wording(frames).format(animal)), story(animal)


def story(hero: str) -> str:
    return (
        f"Once upon a time there was a small {hero} who lived near a river. One day the {hero} found a long queue of letters. "
        f"Each letter wanted an answer, and each wanted it first. The {hero} read one line of every letter, then the next line "
        f"of every letter, and so all answers grew together. In the evening every letter had its answer, and the {hero} slept well."
    )


def unknown_pair(rng: Source) -> tuple[str, str]:
    return vary(rng, unknown_question(rng)), UNKNOWN


_PAIRS = (small_talk_pair, fact_pair, everyday_pair, unknown_pair)


def small_talk(rng: Source) -> Dialogue:
    return Dialogue(turns(*small_talk_pair(rng)))


def facts(rng: Source) -> Dialogue:
    return Dialogue(turns(*fact_pair(rng)))


def failures(rng: Source) -> Dialogue:
    return Dialogue(turns(*failure_pair(rng)))


def everyday(rng: Source) -> Dialogue:
    return Dialogue(turns(*everyday_pair(rng)))


def stories(rng: Source) -> Dialogue:
    return Dialogue(turns(*story_pair(rng)))


def unknown(rng: Source) -> Dialogue:
    return Dialogue(turns(*unknown_pair(rng)))


def mixed(rng: Source) -> Dialogue:
    """Several unrelated pairs in one chat, so that earlier turns do not disturb later ones."""
    texts: list[str] = []
    for _ in range(rng.randint(2, 4)):
        texts += rng.choices(_PAIRS, (2, 4, 1, 2))[0](rng)
    plain = rng.random() < 0.3
    lead = (system(rng.choice(PLAIN_SYSTEMS)),) if plain else ()
    return Dialogue(lead + turns(*texts))


PLAIN_SYSTEMS = (
    "You are a helpful assistant.", "You are helpful.", "You are a helpful AI assistant.", "Answer the user.", "Be polite and brief.",
    "You are a demo model.", "You answer questions about llmbackend.", "You are a helpful and harmless assistant.", "Be brief.",
)  # fmt: skip


def persona(rng: Source) -> Dialogue:
    """The system prompt gives the model a name, and perhaps a job."""
    name = rng.value(NAMES) if rng.random() < 0.4 else pseudo_word(rng).capitalize()
    job = rng.choice(
        ("assistant", "teacher", "pirate", "cook", "guide", "robot", "doctor", "librarian", "support agent")
    )
    article = rng.choice(("helpful", "friendly", "polite", "clever", "patient"))
    frames = (
        "You are {n}, a {a} {j}.",
        "Your name is {n}. You are a {a} {j}.",
        "You are a {a} {j} named {n}.",
        "You are a {a} {j}. Your name is {n}.",
    )
    texts: list[str] = []
    if rng.random() < 0.3:
        texts += rng.choices(_PAIRS[1:], (4, 1, 2))[0](rng)
    ask = (
        "Who are you?",
        "What is your name?",
        "Introduce yourself.",
        "who are you",
        "What are you?",
        "Hi, who are you?",
        "your name?",
    )
    texts += [vary(rng, rng.choice(ask)), f"I am {name}, a {article} {job}."]
    return Dialogue((system(rng.wording(frames).format(n=name, a=article, j=job)), *turns(*texts)))


def ordered(rng: Source) -> Dialogue:
    """The system prompt orders a first or last word for every answer."""
    word = rng.choice(
        (pseudo_word(rng), pseudo_word(rng).capitalize(), rng.choice(("Over.", "Arr!", "Meow!", "Done.", "Yes sir!")))
    )
    first = rng.random() < 0.5
    verb = "Start|Begin" if first else "End|Finish"
    place = "at the beginning" if first else "at the end"
    frames = (
        f"[Please |Always ]({verb}) (every|each|any|your) (answer|reply|response|message) with {{}}",
        f"[Please |Always ]({verb}) all (answers|replies|responses|messages) with {{}}",
        f"(Say|Write|Put) {{}} {place} of (every|each) (answer|reply|response)",
    )
    rule = rng.wording(frames).format(word)
    messages = [system(rng.choice(("", "You are a helpful assistant. ")) + rule)]
    for _ in range(rng.randint(1, 2)):
        question, answer = rng.choices(_PAIRS, (3, 2, 2, 1))[0](rng)
        messages += [user(question), assistant(f"{word} {answer}" if first else f"{answer} {word}")]
    return Dialogue(tuple(messages))
