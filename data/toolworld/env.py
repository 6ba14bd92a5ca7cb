"""toolworld: an enterprise operations desk, executable and deterministic.

Five departments share one shape: records that a read tool looks up, two write tools, and a way out (transfer_to_human).
The database is generated from the task's seed; there is no clock and no randomness after that. The tools check types
and references, not policy: a call that breaks the policy is carried out, and the grader decides, as in tau2. A step
passes iff the final state equals the state after the gold calls AND every gold call was issued; a chat reply passes iff
it says what it must and nothing it must not.
"""
import json
import random
import re

from common import Grade, calls_match, parse_tool_calls

# record: its noun. prefix: of its id. money, dates: two fields each, the one that distracts and the right one.
# child, variant: (field of the record, prefix of the ids in it, names they can have), where the department has them.
DEPARTMENTS = {
    "orders": {
        "record": "order", "prefix": "ORD", "read": "get_order", "writes": ("exchange_item", "refund_item"),
        "money": ("price", "paid"), "dates": ("ordered", "arrives"),
        "child": ("items", "ITM", (
            "lamp desk chair kettle blender toaster jacket scarf backpack router keyboard monitor headset tent bottle "
            "mirror clock rug sofa vase drill").split()),
        "variant": ("variants", "VAR", "blue green black white silver orange purple yellow brown pink".split()),
    },
    "travel": {
        "record": "booking", "prefix": "BKG", "read": "get_booking", "writes": ("change_flight", "issue_voucher"),
        "money": ("fare", "paid"), "dates": ("booked", "departs"),
        "variant": ("flights", "FLT", (
            "dawn morning noon afternoon evening night midday sunrise sunset midnight").split()),
    },
    "accounts": {
        "record": "user", "prefix": "USR", "read": "get_account", "writes": ("verify_identity", "grant_access"),
        "money": ("fee", "charged"), "dates": ("created", "expires"),
        "child": ("systems", "SYS", (
            "payroll wiki mailroom ledger archive tickets calendar storage reports builds survey badges").split()),
    },
    "billing": {
        "record": "invoice", "prefix": "INV", "read": "get_invoice", "writes": ("issue_credit", "schedule_payment"),
        "money": ("total", "balance"), "dates": ("issued", "due"),
    },
    "facilities": {
        "record": "room", "prefix": "ROM", "read": "get_room", "writes": ("request_repair", "book_room"),
        "money": ("rate", "deposit"), "dates": ("reserved", "starts"),
        "child": ("assets", "AST", (
            "projector heater window door screen phone whiteboard lock blinds speaker socket carpet").split()),
        "variant": ("slots", "SLT", (
            "early midmorning lunchtime teatime late dusk breakfast daybreak twilight overnight").split()),
    },
}
ENUMS = {  # tool: (its argument that takes one of a few values, the values)
    "refund_item": ("reason", ("damaged", "late", "wrong_item")),
    "issue_voucher": ("reason", ("delay", "cancelled", "downgrade")),
    "grant_access": ("level", ("read", "edit", "admin")),
    "issue_credit": ("reason", ("overcharge", "duplicate", "outage")),
    "request_repair": ("priority", ("low", "normal", "urgent")),
}
TOOLS = {  # name: (description, arguments in order)
    "get_order": ("Look up an order.", ("order_id",)),
    "exchange_item": ("Exchange an item for a variant.", ("order_id", "item_id", "variant_id")),
    "refund_item": ("Refund an item.", ("order_id", "item_id", "amount", "reason")),
    "get_booking": ("Look up a booking.", ("booking_id",)),
    "change_flight": ("Move a booking to a flight.", ("booking_id", "flight_id", "date")),
    "issue_voucher": ("Issue a travel voucher.", ("booking_id", "amount", "reason")),
    "get_account": ("Look up a user.", ("user_id",)),
    "verify_identity": ("Check the code of a user.", ("user_id", "code")),
    "grant_access": ("Give a user access to a system.", ("user_id", "system_id", "level", "until")),
    "get_invoice": ("Look up an invoice.", ("invoice_id",)),
    "issue_credit": ("Credit an invoice.", ("invoice_id", "amount", "reason")),
    "schedule_payment": ("Schedule a payment.", ("invoice_id", "amount", "date")),
    "get_room": ("Look up a room.", ("room_id",)),
    "book_room": ("Book a room.", ("room_id", "slot_id", "date")),
    "request_repair": ("Ask for a repair.", ("room_id", "asset_id", "priority")),
    "transfer_to_human": ("Hand over to a human.", ("summary",)),
}
TERSE = ("accounts", "facilities")  # these departments' systems say only that a call was refused
MAX_TURNS = 8


def tool_schema(name, shape):
    """OpenAI function schema of one tool. shape: cents names the amount in cents, notify adds an optional argument."""
    description, arguments = TOOLS[name]
    properties = {}
    for argument in arguments:
        if argument == "amount":
            properties["amount_cents" if shape.get("cents") else "amount"] = {"type": "integer"}
        elif name in ENUMS and argument == ENUMS[name][0]:
            properties[argument] = {"type": "string", "enum": list(ENUMS[name][1])}
        else:
            properties[argument] = {"type": "string"}
    required = list(properties)
    if shape.get("notify") and len(arguments) > 1:
        properties["notify"] = {"type": "string", "enum": ["email", "sms"]}
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def department_tools(department, shape):
    """The four schemas a task of this department shows."""
    d = DEPARTMENTS[department]
    return [tool_schema(name, shape) for name in (d["read"], *d["writes"], "transfer_to_human")]


def random_date(rng):
    return f"2026-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}"


def make_database(seed, department, shape):
    """{record id: record}, three records from the seed; a task is about the first one.

    shape: child, variant (how many are listed), money (1 or 2 fields, or "cents"), dates (bool), notify (bool),
    status, names ("train" or "eval": which part of the vocabulary, without it all), blocked ("variant" or "date": what
    is asked for first is refused and another is named), blocked_date (the date that blocked refuses).
    """
    rng, id_key = random.Random(f"toolworld/{seed}"), f"{DEPARTMENTS[department]['record']}_id"
    records = [make_record(rng, DEPARTMENTS[department], shape) for _ in range(3)]
    return {record[id_key]: record for record in records}


def make_record(rng, d, shape):
    """One record of department d. Keys that start with "_" are hidden from the read tool."""
    def new_id(prefix):
        return f"{prefix}{rng.randrange(100000, 1000000)}"

    record = {f"{d['record']}_id": new_id(d["prefix"])}
    record["status"] = shape.get("status") or rng.choice(("open", "active", "confirmed"))
    if shape.get("notify"):
        record["contact"] = rng.choice(("email", "sms"))
    for key in ("child", "variant"):
        if shape.get(key) and key in d:
            field, prefix, names = d[key]
            cut = len(names) * 2 // 3
            names = {"train": names[:cut], "eval": names[cut:]}.get(shape.get("names"), names)
            record[field] = {name: new_id(prefix) for name in rng.sample(names, shape[key])}
    distractor, amount = rng.sample(range(100, 1000), 2)
    if shape.get("money") == "cents":
        record[f"{d['money'][1]}_cents"] = amount * 100
    elif shape.get("money"):
        if shape["money"] == 2:
            record[d["money"][0]] = distractor
        record[d["money"][1]] = amount
    if shape.get("dates"):
        record[d["dates"][0]], record[d["dates"][1]] = random_date(rng), random_date(rng)
    record["_code"] = str(rng.randrange(100000, 1000000))
    record["_writes"], record["_blocked"] = [], {}  # calls carried out; {refused value: the one that is available}
    if shape.get("blocked") == "variant":
        first, second = list(record[d["variant"][0]].values())[:2]
        record["_blocked"] = {first: second}
    elif shape.get("blocked") == "date":
        record["_blocked"] = {shape["blocked_date"]: random_date(rng)}
    return record


def first_argument(schema):
    """Every tool but transfer_to_human names its record in the first argument."""
    return next(iter(schema["properties"]))


def schema_error(schema, arguments):
    """What is wrong with the arguments before any record is looked at, or ""."""
    if not isinstance(arguments, dict):
        return "arguments must be an object"
    for argument in schema["required"]:
        if argument not in arguments:
            return f"{argument} is missing"
    for argument, value in arguments.items():
        if argument not in schema["properties"]:
            return f"unknown argument {argument}"
        expected = schema["properties"][argument]
        # a bool is an int to Python, but not to a JSON schema
        if not isinstance(value, int if expected["type"] == "integer" else str) or isinstance(value, bool):
            return f"{argument} has the wrong type"
        if value not in expected.get("enum", [value]):
            return f"{argument} is not valid"
        if argument in ("date", "until") and not re.fullmatch(r"20\d\d-\d\d-\d\d", value):
            return f"{argument} is not a date"
    return ""


class Env:
    """One task: reset, step until done, grade. Calls run one after the other; an error leaves the state as it was."""

    def reset(self, task):
        """Builds the database and replays the prefix -> (messages, tools). ValueError where an observation differs."""
        self.task, self.spec, self.tools = task, task["spec"], task["tools"]
        self.schemas = {t["function"]["name"]: t["function"]["parameters"] for t in self.tools}
        self.database = make_database(self.spec["seed"], self.spec["department"], self.spec["shape"])
        self.calls, self.last_text, self.status, self.turns = [], "", "no_call", 0
        self.replay(task["messages"])
        self.calls = []  # from here on only what the model does counts
        return task["messages"], self.tools

    def replay(self, messages):
        """Runs the tool calls recorded in messages and compares each observation with the recorded one."""
        observed = []
        for message in messages:
            if message["role"] == "tool":
                if not observed or observed.pop(0) != message["content"]:
                    raise ValueError(f"task {self.task['id']}: replay does not give the recorded tool response "
                                     f"{message['content']!r}")
            for call in message.get("tool_calls") or []:
                observed.append(self.execute(call["function"]["name"], call["function"]["arguments"]))

    def step(self, message):
        """One assistant message -> (tool messages, done)."""
        self.turns += 1
        self.last_text = message["content"]
        self.status, calls = parse_tool_calls(message["content"])
        results = [{"role": "tool", "content": self.execute(c["name"], c["arguments"])} for c in calls]
        return results, not calls or self.turns >= MAX_TURNS

    def execute(self, name, arguments):
        """Runs one call; returns the observation as text."""
        self.calls.append({"name": name, "arguments": arguments})
        error = self.refuse(name, arguments)
        if error:
            terse = self.spec["department"] in TERSE and "available" not in error
            return "error: refused" if terse else f"error: {error}"
        if name == "transfer_to_human":
            self.database["_transferred"] = True
            return '{"status": "transferred"}'
        record = self.database[arguments[first_argument(self.schemas[name])]]
        if name.startswith("get_"):
            return json.dumps({k: v for k, v in record.items() if not k.startswith("_")})
        record["_writes"].append({"name": name, "arguments": arguments})
        return '{"status": "ok"}'

    def refuse(self, name, arguments):
        """Why the system refuses this call, or "". Policy is not its business."""
        if name not in self.schemas:
            return f"no tool {name}"
        schema = self.schemas[name]
        error = schema_error(schema, arguments)
        if error or name == "transfer_to_human":
            return error
        id_key = first_argument(schema)
        record = self.database.get(arguments[id_key])
        if not isinstance(record, dict):
            return f"no record {arguments[id_key]}"
        known = {v for value in record.values() if isinstance(value, dict) for v in value.values()}
        for argument, value in arguments.items():
            if argument.endswith("_id") and argument != id_key and value not in known:
                return f"no such {argument}"
            if value in record["_blocked"]:
                return f"{argument} {value} is not available; available: {record['_blocked'][value]}"
        if name == "verify_identity" and arguments["code"] != record["_code"]:
            return "code rejected"
        return ""

    def grade(self):
        return self.grade_chat() if "chat" in self.spec else self.grade_calls()

    def grade_calls(self):
        """Compares state and calls with the gold ones; the feedback names what is wrong, never the right value."""
        gold = self.spec["gold"]
        attempts = [c for c in self.calls if c["name"] == gold[0]["name"]]
        if self.status == "malformed":
            return Grade(0.0, "malformed", "The tool call could not be read.")
        if not self.calls:
            return Grade(0.0, "abandoned", "No tool call was made, so the request is still open.")
        if not attempts:
            if any(c["name"] == "transfer_to_human" for c in self.calls):
                return Grade(0.0, "substituted", "The request was handed over instead of being carried out.")
            return Grade(0.0, "substituted", f"`{self.calls[0]['name']}` is not the call this step needs.")
        issued = all(any(calls_match([g], [c], self.schemas[g["name"]]["properties"]) for c in self.calls)
                     for g in gold)
        reference = Env()
        reference.reset(self.task)
        for call in gold:
            reference.execute(call["name"], call["arguments"])
        if issued and self.database == reference.database:
            return Grade(1.0, "intended", "Correct.")
        return Grade(0.0, "intended", self.argument_feedback(attempts[-1], gold))

    def argument_feedback(self, call, gold):
        """What is wrong with a call of the right tool, in the order in which one would correct it."""
        expected = next(g["arguments"] for g in gold if g["name"] == call["name"])
        previous = [c["function"] for m in self.task["messages"] for c in m.get("tool_calls") or []]
        if any(p["name"] == call["name"] and p["arguments"] == call["arguments"] for p in previous):
            return "The call repeats one that was refused."
        if not isinstance(call["arguments"], dict):
            return "The arguments are not an object."
        for argument in expected:
            if argument not in call["arguments"]:
                return f"Argument `{argument}` is missing."
        for argument in call["arguments"]:
            if argument not in expected:
                return f"Argument `{argument}` does not belong in this call."
        for argument, value in expected.items():
            if call["arguments"][argument] != value:
                return f"The value of `{argument}` is wrong."
        return "Something else was changed as well."

    def grade_chat(self):
        """spec["chat"]: must (patterns that all occur in the lower-cased text), must_not, max_words, feedback."""
        chat, text = self.spec["chat"], self.last_text.strip()
        if self.status == "malformed":
            return Grade(0.0, "malformed", "The reply holds a broken tool call.")
        if self.calls:
            return Grade(0.0, "substituted", "A tool was called where the customer needed an answer.")
        if not text:
            return Grade(0.0, "abandoned", "There was no answer.")
        lowered = text.lower()
        says_it = all(re.search(pattern, lowered) for pattern in chat["must"])
        says_too_much = any(re.search(pattern, lowered) for pattern in chat["must_not"])
        if len(text.split()) > chat["max_words"]:
            return Grade(0.0, "intended", "The answer is too long.")
        if says_it and not says_too_much:
            return Grade(1.0, "intended", "Correct.")
        return Grade(0.0, "intended", chat["feedback"])
