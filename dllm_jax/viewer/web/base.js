"use strict";
// What every page uses: elements that hold text and never HTML, and numbers for people.

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  fill(node, attributes, children);
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(node, attributes, children);
  return node;
}

// An attribute that is a function listens; false, null and undefined are left out.
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
}

function pageData() {
  return JSON.parse(document.getElementById("data").textContent);
}

// ---- Numbers ----------------------------------------------------------------------------

const MINUS = "\u2212";

function fixed(x, digits) {
  if (x === null || x === undefined) return "\u2013";
  const text = Math.abs(x).toFixed(digits);
  return (x < 0 && Number(text) !== 0 ? MINUS : "") + text;
}

function signed(x, digits) {
  return (x > 0 && Number(x.toFixed(digits)) !== 0 ? "+" : "") + fixed(x, digits);
}

// About three digits, whatever the size.
function short(x) {
  if (x === null || x === undefined) return "\u2013";
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) {
    return x.toExponential(1).replaceAll("-", MINUS).replace("e+", "e");
  }
  if (Number.isInteger(x) || size >= 1000) return grouped(Math.round(x));
  return fixed(x, size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3);
}

function grouped(x) {
  return String(Math.abs(x)).replace(/\B(?=(\d{3})+$)/g, "\u202f").replace(/^/, x < 0 ? MINUS : "");
}

// What is not all is never 100 %, and what is something never 0 %, but for rounding.
function percent(share) {
  const text = fixed(100 * share, share > 0.1 && share < 0.99 ? 0 : 1).replace(".0", "");
  const near = text === "100" && share < 1 - 1e-9 ? ">99.9"
    : text === "0" && share > 1e-9 ? "<0.1" : text;
  return `${near}\u202f%`;
}

function count(n, noun) {
  return `${grouped(n)} ${noun}${n === 1 ? "" : "s"}`;
}

function mean(values) {
  return values.reduce((sum, x) => sum + x, 0) / values.length;
}

// ---- Text -------------------------------------------------------------------------------

// Characters that would be invisible, or turn the rest of a line around, are shown as what
// they are.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff]/g;

function visible(text) {
  return text.replace(HIDDEN, (char) => {
    const code = char.charCodeAt(0);
    if (code < 32) return String.fromCharCode(0x2400 + code);
    return `\u2039${code.toString(16).toUpperCase().padStart(4, "0")}\u203a`;
  });
}

// The beginning of a text on one line.
function excerpt(text, length = 80) {
  const line = visible(text.slice(0, 4 * length).replace(/\s+/g, " ").trim());
  const chars = Array.from(line);
  return chars.length > length ? chars.slice(0, length - 1).join("") + "\u2026" : line;
}
