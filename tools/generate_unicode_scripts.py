"""Write sparse_losses/vocabulary/unicode_scripts.json from the Unicode database of ``regex``.

Run ``python tools/generate_unicode_scripts.py`` after an update of ``regex``. If a new version of
Unicode adds a script, an error names its first character: add the script's long name below.
"""

import json
import re
import sys
from importlib.metadata import distribution
from pathlib import Path

import regex

TARGET = Path(__file__).parents[1] / "sparse_losses" / "vocabulary" / "unicode_scripts.json"

# The scripts that have characters, by their long names in PropertyValueAliases.txt.
NAMES = """
Adlam Ahom Anatolian_Hieroglyphs Arabic Armenian Avestan Balinese Bamum Bassa_Vah Batak Bengali
Beria_Erfe Bhaiksuki Bopomofo Brahmi Braille Buginese Buhid Canadian_Aboriginal Carian
Caucasian_Albanian Chakma Cham Cherokee Chorasmian Common Coptic Cuneiform Cypriot Cypro_Minoan
Cyrillic Deseret Devanagari Dives_Akuru Dogra Duployan Egyptian_Hieroglyphs Elbasan Elymaic Ethiopic
Garay Georgian Glagolitic Gothic Grantha Greek Gujarati Gunjala_Gondi Gurmukhi Gurung_Khema Han
Hangul Hanifi_Rohingya Hanunoo Hatran Hebrew Hiragana Imperial_Aramaic Inherited
Inscriptional_Pahlavi Inscriptional_Parthian Javanese Jurchen Kaithi Kannada Katakana Kawi Kayah_Li
Kharoshthi Khitan_Small_Script Khmer Khojki Khudawadi Kirat_Rai Lao Latin Lepcha Limbu Linear_A
Linear_B Lisu Lycian Lydian Mahajani Makasar Malayalam Mandaic Manichaean Marchen Masaram_Gondi
Medefaidrin Meetei_Mayek Mende_Kikakui Meroitic_Cursive Meroitic_Hieroglyphs Miao Modi Mongolian Mro
Multani Myanmar Nabataean Nag_Mundari Nandinagari New_Tai_Lue Newa Nko Nushu Nyiakeng_Puachue_Hmong
Ogham Ol_Chiki Ol_Onal Old_Hungarian Old_Italic Old_North_Arabian Old_Permic Old_Persian Old_Sogdian
Old_South_Arabian Old_Turkic Old_Uyghur Oriya Osage Osmanya Pahawh_Hmong Palmyrene Pau_Cin_Hau
Phags_Pa Phoenician Proto_Cuneiform Psalter_Pahlavi Rejang Runic Samaritan Saurashtra Seal Sharada
Shavian Siddham Sidetic SignWriting Sinhala Sogdian Sora_Sompeng Soyombo Sundanese Sunuwar
Syloti_Nagri Syriac Tagalog Tagbanwa Tai_Le Tai_Tham Tai_Viet Tai_Yo Takri Tamil Tangsa Tangut
Telugu Thaana Thai Tibetan Tifinagh Tirhuta Todhri Tolong_Siki Toto Tulu_Tigalari Ugaritic Vai
Vithkuqi Wancho Warang_Citi Yezidi Yi Zanabazar_Square
"""


def script_ranges() -> dict[str, list[int]]:
    """Return the first and last code point of each run of every script, in one flat list."""
    characters = "".join(map(chr, range(sys.maxunicode + 1)))
    left = bytearray(b"\1") * len(characters)
    scripts = {}
    for name in [*NAMES.split(), "Unknown"]:
        runs = []
        for run in regex.finditer(rf"\p{{Script={name}}}+", characters):
            if not all(left[run.start() : run.end()]):
                raise SystemExit(f"U+{run.start():04X} belongs to {name} and to another script")
            left[run.start() : run.end()] = bytes(len(run[0]))
            runs += [run.start(), run.end() - 1]
        if not runs:
            raise SystemExit(f"{name} has no characters")
        scripts[name] = runs
    if any(left):
        raise SystemExit(f"U+{left.index(1):04X} belongs to a script that is not listed")
    del scripts["Unknown"]
    return scripts


def unicode_version() -> str:
    """Return the Unicode version from the metadata of ``regex``; its module does not state it."""
    found = re.search(
        r"supports Unicode (\d+(?:\.\d+)*)", distribution("regex").read_text("METADATA") or ""
    )
    if found is None:
        raise SystemExit("expected the Unicode version in the metadata of regex, got none")
    return found[1]


def main() -> None:
    """Write one line per script, so that a diff between versions is readable."""
    head = {
        "unicode_version": unicode_version(),
        "source": "Unicode Character Database, property Script, by way of regex "
        + regex.__version__,
        "license": "Unicode License v3, see unicode_scripts.license.txt",
        "format": "first and last code point of each range, alternating",
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    scripts = [
        f"    {json.dumps(name)}: {json.dumps(runs, separators=(',', ':'))}"
        for name, runs in sorted(script_ranges().items())
    ]
    body = ",\n".join(scripts)
    TARGET.write_text(
        "{\n" + "\n".join(lines) + '\n  "scripts": {\n' + body + "\n  }\n}\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
