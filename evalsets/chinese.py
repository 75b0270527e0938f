"""The built-in set `chinese`: measure words, capitals, opposites, word order and sums in Chinese, chance 0.3."""

from __future__ import annotations

import random

from qtool.evalsets.generated import Question, generated_set, others
from qtool.evalsets.items import ChoiceSet

NUMERALS = "一两三四五六七八九十"
MEASURES = {  # measure word → nouns that take it and none of the others here
    "本": ("书", "词典", "小说", "杂志"), "辆": ("汽车", "自行车", "卡车", "公共汽车"), "匹": ("马", "骆驼"),
    "棵": ("树", "白菜", "小草"), "朵": ("花", "云", "玫瑰"), "架": ("飞机", "钢琴", "直升机"),
    "艘": ("船", "轮船", "军舰"),
    "封": ("信", "电子邮件"), "首": ("歌", "诗", "曲子"), "件": ("衣服", "衬衫", "毛衣"),
    "双": ("鞋", "筷子", "袜子"),
    "把": ("椅子", "雨伞", "钥匙", "剪刀"), "间": ("教室", "卧室", "办公室"), "座": ("山", "桥", "城市"),
}  # fmt: skip
CAPITALS = {
    "中国": "北京", "日本": "东京", "法国": "巴黎", "德国": "柏林", "英国": "伦敦", "俄罗斯": "莫斯科",
    "意大利": "罗马",
    "西班牙": "马德里", "韩国": "首尔", "泰国": "曼谷", "越南": "河内", "埃及": "开罗", "希腊": "雅典",
    "加拿大": "渥太华",
    "澳大利亚": "堪培拉", "美国": "华盛顿", "古巴": "哈瓦那", "印度": "新德里", "伊朗": "德黑兰",
    "瑞典": "斯德哥尔摩",
    "挪威": "奥斯陆", "芬兰": "赫尔辛基", "波兰": "华沙", "葡萄牙": "里斯本", "奥地利": "维也纳",
    "肯尼亚": "内罗毕",
    "秘鲁": "利马", "智利": "圣地亚哥", "丹麦": "哥本哈根", "爱尔兰": "都柏林", "伊拉克": "巴格达",
    "匈牙利": "布达佩斯",
    "蒙古": "乌兰巴托", "尼泊尔": "加德满都",
}  # fmt: skip
OPPOSITES = {
    "大": "小", "高": "低", "长": "短", "快": "慢", "冷": "热", "新": "旧", "远": "近", "胖": "瘦", "早": "晚",
    "黑": "白",
    "左": "右", "上": "下", "前": "后", "里": "外", "买": "卖", "来": "去", "开": "关", "哭": "笑", "生": "死",
    "贵": "便宜",
    "轻": "重", "软": "硬", "深": "浅", "宽": "窄", "强": "弱", "富": "穷", "真": "假", "美": "丑", "多": "少",
    "干": "湿",
    "先进": "落后", "成功": "失败", "安全": "危险", "开始": "结束", "简单": "复杂", "增加": "减少",
}  # fmt: skip
PEOPLE = ("老师", "学生", "医生", "妈妈", "爸爸", "朋友", "司机", "邻居", "哥哥", "妹妹")
DONE = {
    "看完": "书",
    "写好": "信",
    "吃光": "苹果",
    "洗干净": "衣服",
    "打开": "窗户",
    "关上": "门",
    "喝完": "牛奶",
    "修好": "自行车",
}


def measure_word(rng: random.Random) -> Question:
    right = rng.choice(sorted(MEASURES))
    noun, count = rng.choice(MEASURES[right]), rng.choice(NUMERALS)
    who = rng.choice(("这里有", "他看见了", "我们需要", "前面有"))
    wrong = tuple(f"{count}{word}{noun}。" for word in others(rng, right, list(MEASURES)))
    return Question(who, f"{count}{right}{noun}。", wrong)


def capital(rng: random.Random) -> Question:
    country = rng.choice(sorted(CAPITALS))
    city = CAPITALS[country]
    if rng.random() < 0.4:
        return Question(f"{city}是哪个国家的首都？{city}是", f"{country}的首都。",
                        tuple(f"{c}的首都。" for c in others(rng, country, list(CAPITALS))))  # fmt: skip
    frame = rng.choice(("{}的首都是", "问：{}的首都是哪里？答：", "大家都知道，{}的首都是"))
    return Question(frame.format(country), city, others(rng, city, list(CAPITALS.values())))


def opposite(rng: random.Random) -> Question:
    word = rng.choice(sorted(OPPOSITES))
    frame = rng.choice(("“{}”的反义词是", "问：“{}”的反义词是什么？答：", "与“{}”意思相反的词是"))
    right = OPPOSITES[word]
    wrong = others(rng, right, [w for w in OPPOSITES.values() if w != word])
    return Question(frame.format(word), f"“{right}”", tuple(f"“{w}”" for w in wrong))


def word_order(rng: random.Random) -> Question:
    """The object that 把 marks stands before the verb."""
    who, verb = rng.choice(PEOPLE), rng.choice(sorted(DONE))
    when, thing = rng.choice(("昨天", "刚才", "已经", "今天早上")), DONE[verb]
    return Question("", f"{who}{when}把{thing}{verb}了。", (f"{who}{when}把{verb}{thing}了。",))


def addition(rng: random.Random) -> Question:
    a, b = rng.randrange(2, 60), rng.randrange(2, 40)
    near = [a + b + d for d in (-2, -1, 1, 2, 10)]
    return Question(f"问：{a}加{b}等于多少？答：", str(a + b), tuple(str(v) for v in rng.sample(near, 3) if v > 0))


def chinese_set() -> ChoiceSet:
    """The 500 questions, the same on every machine."""
    return generated_set("chinese", (measure_word, capital, opposite, word_order, addition), delimiter="")
