"""The built-in set `facts`: capitals, continents, elements and opposites in multiple choice, chance 0.25.

A hundred countries are asked for their capital, the capital for its country, and the country for its continent; sixty
elements and their symbols for each other; eighty words for their opposite.
"""

from __future__ import annotations

import random

from qtool.evalsets.generated import SEED, others
from qtool.evalsets.items import ChoiceSet, Item

_COUNTRIES = {
    "Europe": (
        "France Paris, Germany Berlin, Italy Rome, Spain Madrid, Portugal Lisbon, Austria Vienna, Poland Warsaw, "
        "Hungary Budapest, Greece Athens, Sweden Stockholm, Norway Oslo, Finland Helsinki, Denmark Copenhagen, "
        "Ireland Dublin, Belgium Brussels, Romania Bucharest, Bulgaria Sofia, Serbia Belgrade, Croatia Zagreb, "
        "Slovenia Ljubljana, Slovakia Bratislava, Estonia Tallinn, Latvia Riga, Lithuania Vilnius, Ukraine Kyiv, "
        "Belarus Minsk, Iceland Reykjavik, Albania Tirana, Malta Valletta, Switzerland Bern"
    ),
    "Asia": (
        "Japan Tokyo, China Beijing, India New_Delhi, Thailand Bangkok, Vietnam Hanoi, Indonesia Jakarta, Malaysia "
        "Kuala_Lumpur, Philippines Manila, Pakistan Islamabad, Bangladesh Dhaka, Nepal Kathmandu, Iran Tehran, Iraq "
        "Baghdad, Syria Damascus, Lebanon Beirut, Jordan Amman, Mongolia Ulaanbaatar, Afghanistan Kabul, Qatar "
        "Doha, Oman Muscat, Cambodia Phnom_Penh, Laos Vientiane, Bhutan Thimphu, Uzbekistan Tashkent, South_Korea "
        "Seoul, Saudi_Arabia Riyadh"
    ),
    "Africa": (
        "Egypt Cairo, Kenya Nairobi, Ethiopia Addis_Ababa, Ghana Accra, Senegal Dakar, Morocco Rabat, Algeria "
        "Algiers, Tunisia Tunis, Libya Tripoli, Sudan Khartoum, Uganda Kampala, Rwanda Kigali, Zambia Lusaka, "
        "Zimbabwe Harare, Angola Luanda, Mozambique Maputo, Namibia Windhoek, Botswana Gaborone, Somalia Mogadishu, "
        "Nigeria Abuja, Mali Bamako, Madagascar Antananarivo"
    ),
    "South America": (
        "Argentina Buenos_Aires, Brazil Brasilia, Chile Santiago, Peru Lima, Colombia Bogota, Venezuela Caracas, "
        "Ecuador Quito, Uruguay Montevideo, Paraguay Asuncion, Suriname Paramaribo"
    ),
    "North America": (
        "Canada Ottawa, Cuba Havana, Jamaica Kingston, Honduras Tegucigalpa, Nicaragua Managua, Haiti "
        "Port-au-Prince, Costa_Rica San_Jose, Mexico Mexico_City"
    ),
    "Oceania": ("Australia Canberra, New_Zealand Wellington, Fiji Suva, Samoa Apia"),
}
_ELEMENTS = (
    "hydrogen H, helium He, lithium Li, beryllium Be, boron B, carbon C, nitrogen N, oxygen O, fluorine F, neon "
    "Ne, sodium Na, magnesium Mg, aluminium Al, silicon Si, phosphorus P, sulfur S, chlorine Cl, argon Ar, "
    "potassium K, calcium Ca, scandium Sc, titanium Ti, vanadium V, chromium Cr, manganese Mn, iron Fe, cobalt "
    "Co, nickel Ni, copper Cu, zinc Zn, gallium Ga, germanium Ge, arsenic As, selenium Se, bromine Br, krypton "
    "Kr, rubidium Rb, strontium Sr, yttrium Y, zirconium Zr, silver Ag, cadmium Cd, tin Sn, antimony Sb, iodine "
    "I, xenon Xe, caesium Cs, barium Ba, tungsten W, platinum Pt, gold Au, mercury Hg, lead Pb, bismuth Bi, "
    "radon Rn, radium Ra, thorium Th, uranium U, plutonium Pu, palladium Pd"
)
_OPPOSITES = (
    "hot cold, big small, tall short, fast slow, young old, rich poor, hard soft, light dark, wet dry, full "
    "empty, open closed, early late, heavy weightless, high low, strong weak, thick thin, clean dirty, loud "
    "quiet, happy sad, good bad, true false, near far, deep shallow, wide narrow, sharp blunt, smooth rough, "
    "sweet bitter, brave cowardly, cheap expensive, easy difficult, alive dead, awake asleep, begin end, buy "
    "sell, push pull, win lose, give take, love hate, laugh cry, rise fall, arrive leave, remember forget, "
    "build destroy, attack defend, accept refuse, succeed fail, increase decrease, enter exit, lend borrow, "
    "teach learn, day night, summer winter, morning evening, north south, east west, friend enemy, war peace, "
    "question answer, top bottom, inside outside, before after, always never, everything nothing, up down, left "
    "right, front back, first last, male female, king queen, husband wife, ancient modern, public private, "
    "guilty innocent, major minor, positive negative, maximum minimum, victory defeat, profit loss, arrival "
    "departure, ally opponent"
)


def _pairs(text: str) -> list[tuple[str, str]]:
    """`a b, c d` → [(a, b), (c, d)], with spaces for underscores."""
    found = [entry.split() for entry in text.split(", ")]
    return [(first.replace("_", " "), second.replace("_", " ")) for first, second in found]


def facts_set() -> ChoiceSet:
    """The 500 questions, the same on every machine."""
    rng = random.Random(f"{SEED} facts")
    items: list[Item] = []

    def ask(kind: str, about: str, context: str, right: str, pool: list[str]) -> None:
        choices = [right, *others(rng, right, pool)]
        rng.shuffle(choices)
        items.append(Item(f"{kind}-{about}", context, tuple(choices), choices.index(right), " ", kind))

    located = [(*pair, continent) for continent, text in _COUNTRIES.items() for pair in _pairs(text)]
    countries, capitals = [c for c, _, _ in located], [c for _, c, _ in located]
    for country, capital, continent in located:
        ask("capital", country, f"The capital of {country} is", capital, capitals)
        ask("country", capital, f"{capital} is the capital of", country, countries)
        ask("continent", country, f"The country {country} lies on the continent of", continent, list(_COUNTRIES))
    elements = _pairs(_ELEMENTS)
    for element, symbol in elements:
        ask("symbol", element, f"The chemical symbol of {element} is", symbol, [s for _, s in elements])
        ask("element", symbol, f"{symbol} is the chemical symbol of", element, [e for e, _ in elements])
    opposites = _pairs(_OPPOSITES)
    for word, opposite in opposites:
        ask("opposite", word, f'The opposite of "{word}" is', f'"{opposite}"', [f'"{o}"' for _, o in opposites])
    return ChoiceSet("facts", tuple(items), f"built in, seed {SEED}")
