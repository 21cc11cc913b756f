"""What target and drafter read in the self-check: questions, and answers as an assistant writes them."""

CONVERSATIONS: tuple[tuple[str, str], ...] = (
    (
        "Explain in a few sentences why the sky is blue.",
        "The sky looks blue because of the way sunlight is scattered by the air. Sunlight contains"
        " all colors, and each color has its own wavelength. Blue light has a shorter wavelength"
        " than red light, so the molecules of the air scatter it in all directions much more"
        " strongly. When you look up, this scattered blue light reaches your eyes from every part"
        " of the sky.",
    ),
    (
        "Write a Python function that returns the n-th Fibonacci number.",
        "Here is a Python function that returns the n-th Fibonacci number:\n\n```python\ndef"
        " fibonacci(n):\n    if n <= 0:\n        return 0\n    elif n == 1:\n        return 1"
        "\n    else:\n        a, b = 0, 1\n        for i in range(2, n + 1):\n            a, b = b,"
        " a + b\n        return b\n```\n\nThe function starts with the first two numbers and adds"
        " them up until it reaches the n-th number.",
    ),
    (
        "A box holds 12 pens. How many pens are in 7 boxes, and how many are left if 15 are given away?",
        "To find the total number of pens, we multiply the number of boxes by the number of pens in"
        " each box:\n\n7 x 12 = 84\n\nSo there are 84 pens in 7 boxes. If 15 pens are given away,"
        " we subtract 15 from the total:\n\n84 - 15 = 69\n\nTherefore, there are 69 pens left.",
    ),
    (
        "Give me three tips for learning a new language.",
        "Here are three tips for learning a new language:\n\n1. Practice every day: Even ten"
        " minutes a day are better than one long lesson a week.\n2. Listen and speak: Watch movies,"
        " listen to music, and talk to native speakers as often as you can.\n3. Learn words in"
        " context: Instead of long lists of words, learn whole sentences that you can use in"
        " everyday life.",
    ),
)
